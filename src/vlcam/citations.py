"""Who published what: authors, title, venue and year of the papers behind the named recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Citation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Citation:
    """One published source. `str(citation)` is its one line: family names, title, venue and year.

    Attributes:
        key: the name under which BibTeX finds it.
        authors: each as `Family, Given`; `others` as the last one stands for contributors who are not named.
        title: as published.
        venue: the conference or journal in short, as the one line prints it; empty where there is none.
        year: of publication.
        kind: the type of its BibTeX entry.
        container: the conference or journal in full; empty where `venue` is its name.
        doi: digital object identifier, without an address before it; empty where it was not looked up.
        eprint: number on arXiv; empty where it has none or it was not looked up.
        url: where to find it, if neither of those leads there.
    """

    key: str
    authors: tuple[str, ...]
    title: str
    venue: str
    year: int
    kind: Literal["inproceedings", "article", "misc"] = "inproceedings"
    container: str = ""
    doi: str = ""
    eprint: str = ""
    url: str = ""

    @property
    def families(self) -> str:
        """The family names of the authors, with commas between; unnamed contributors as `and contributors`."""
        names = ", ".join(author.partition(",")[0] for author in self.authors)
        return names.replace(", others", " and contributors")

    def __str__(self) -> str:
        """One line: family names, title, venue and year."""
        venue = self.venue or (f"arXiv:{self.eprint}," if self.eprint else "")
        dated = venue if str(self.year) in venue.split() else f"{venue} {self.year}".strip()
        stop = "" if self.title.endswith("?") else "."
        return f"{self.families}. {self.title}{stop} {dated}"


_ICCV = "IEEE/CVF International Conference on Computer Vision (ICCV)"
_CVPR = "IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)"
_WACV = "IEEE Winter Conference on Applications of Computer Vision (WACV)"
_ICML = "International Conference on Machine Learning (ICML)"
_TMLR = "Transactions on Machine Learning Research"

GRADCAM = Citation(
    key="selvaraju2017gradcam",
    authors=(
        "Selvaraju, Ramprasaath R.",
        "Cogswell, Michael",
        "Das, Abhishek",
        "Vedantam, Ramakrishna",
        "Parikh, Devi",
        "Batra, Dhruv",
    ),
    title="Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization",
    venue="ICCV",
    year=2017,
    container="IEEE International Conference on Computer Vision (ICCV)",
    doi="10.1109/ICCV.2017.74",
    eprint="1610.02391",
)
BLIP = Citation(
    key="li2022blip",
    authors=("Li, Junnan", "Li, Dongxu", "Xiong, Caiming", "Hoi, Steven"),
    title="BLIP: Bootstrapping Language-Image Pre-training for Unified Vision-Language Understanding and Generation",
    venue="ICML",
    year=2022,
    container=_ICML,
    eprint="2201.12086",
)
ALBEF = Citation(
    key="li2021albef",
    authors=(
        "Li, Junnan",
        "Selvaraju, Ramprasaath R.",
        "Gotmare, Akhilesh Deepak",
        "Joty, Shafiq",
        "Xiong, Caiming",
        "Hoi, Steven",
    ),
    title="Align before Fuse: Vision and Language Representation Learning with Momentum Distillation",
    venue="NeurIPS",
    year=2021,
    container="Advances in Neural Information Processing Systems (NeurIPS)",
    eprint="2107.07651",
)
PLUS_PLUS = Citation(
    key="chattopadhay2018gradcampp",
    authors=(
        "Chattopadhay, Aditya",
        "Sarkar, Anirban",
        "Howlader, Prantik",
        "Balasubramanian, Vineeth N.",
    ),
    title="Grad-CAM++: Generalized Gradient-based Visual Explanations for Deep Convolutional Networks",
    venue="WACV",
    year=2018,
    container=_WACV,
    doi="10.1109/WACV.2018.00097",
    eprint="1710.11063",
)
XGRADCAM = Citation(
    key="fu2020xgradcam",
    authors=("Fu, Ruigang", "Hu, Qingyong", "Dong, Xiaohu", "Guo, Yulan", "Gao, Yinghui", "Li, Biao"),
    title="Axiom-based Grad-CAM: Towards Accurate Visualization and Explanation of CNNs",
    venue="BMVC",
    year=2020,
    container="British Machine Vision Conference (BMVC)",
    eprint="2008.02312",
)
HIRESCAM = Citation(
    key="draelos2020hirescam",
    authors=("Draelos, Rachel Lea", "Carin, Lawrence"),
    title="Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural networks",
    venue="",
    year=2020,
    kind="misc",
    eprint="2011.08891",
)
LAYERCAM = Citation(
    key="jiang2021layercam",
    authors=("Jiang, Peng-Tao", "Zhang, Chang-Bin", "Hou, Qibin", "Cheng, Ming-Ming", "Wei, Yunchao"),
    title="LayerCAM: Exploring Hierarchical Class Activation Maps for Localization",
    venue="IEEE Transactions on Image Processing",
    year=2021,
    kind="article",
    doi="10.1109/TIP.2021.3089943",
)
EIGENCAM = Citation(
    key="muhammad2020eigencam",
    authors=("Muhammad, Mohammed Bany", "Yeasin, Mohammed"),
    title="Eigen-CAM: Class Activation Map using Principal Components",
    venue="IJCNN",
    year=2020,
    container="International Joint Conference on Neural Networks (IJCNN)",
    doi="10.1109/IJCNN48605.2020.9206626",
    eprint="2008.00299",
)
PGC = Citation(
    key="gildenblat2021pytorchgradcam",
    authors=("Gildenblat, Jacob", "others"),
    title="PyTorch library for CAM methods",
    venue="",
    year=2021,
    kind="misc",
    url="https://github.com/jacobgil/pytorch-grad-cam",
)
FINERCAM = Citation(
    key="zhang2025finercam",
    authors=(
        "Zhang, Ziheng",
        "Gu, Jianyang",
        "Chowdhury, Arpita",
        "Mai, Zheda",
        "Carlyn, David",
        "Berger-Wolf, Tanya",
        "Su, Yu",
        "Chao, Wei-Lun",
    ),
    title="Finer-CAM: Spotting the Difference Reveals Finer Details for Visual Explanation",
    venue="CVPR",
    year=2025,
    container=_CVPR,
    eprint="2501.11309",
)
GSCORECAM = Citation(
    key="chen2022gscorecam",
    authors=("Chen, Peijie", "Li, Qi", "Biaz, Saad", "Bui, Trung", "Nguyen, Anh"),
    title="gScoreCAM: What Objects Is CLIP Looking At?",
    venue="ACCV",
    year=2022,
    container="Asian Conference on Computer Vision (ACCV)",
    doi="10.1007/978-3-031-26316-3_35",
)
GRADECLIP = Citation(
    key="zhao2024gradeclip",
    authors=("Zhao, Chenyang", "Wang, Kun", "Zeng, Xingyu", "Zhao, Rui", "Chan, Antoni B."),
    title="Gradient-based Visual Explanation for Transformer-based CLIP",
    venue="ICML",
    year=2024,
    container=_ICML,
    url="https://proceedings.mlr.press/v235/zhao24p.html",
)
SCORECAM = Citation(
    key="wang2020scorecam",
    authors=(
        "Wang, Haofan",
        "Wang, Zifan",
        "Du, Mengnan",
        "Yang, Fan",
        "Zhang, Zijian",
        "Ding, Sirui",
        "Mardziel, Piotr",
        "Hu, Xia",
    ),
    title="Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks",
    venue="CVPR Workshops",
    year=2020,
    container="IEEE/CVF Conference on Computer Vision and Pattern Recognition Workshops (CVPRW)",
    doi="10.1109/CVPRW50498.2020.00020",
    eprint="1910.01279",
)
ABLATIONCAM = Citation(
    key="desai2020ablationcam",
    authors=("Desai, Saurabh", "Ramaswamy, Harish G."),
    title="Ablation-CAM: Visual Explanations for Deep Convolutional Network via Gradient-free Localization",
    venue="WACV",
    year=2020,
    container=_WACV,
    doi="10.1109/WACV45572.2020.9093360",
)
RECIPROCAM = Citation(
    key="byun2023reciprocam",
    authors=("Byun, Seok-Yong", "Lee, Wonju"),
    title="ViT-ReciproCAM: Gradient and Attention-Free Visual Explanations for Vision Transformer",
    venue="",
    year=2023,
    kind="misc",
    eprint="2310.02588",
)
TRANSITION = Citation(
    key="yuan2021transition",
    authors=("Yuan, Tingyi", "Li, Xuhong", "Xiong, Haoyi", "Cao, Hui", "Dou, Dejing"),
    title="Explaining Information Flow Inside Vision Transformers Using Markov Chain",
    venue="NeurIPS 2021 Workshop on Explainable AI Approaches for Debugging and Diagnosis",
    year=2021,
    url="https://openreview.net/forum?id=TT-cf6QSDaQ",
)
BEYOND = Citation(
    key="chen2023beyond",
    authors=("Chen, Jiamin", "Li, Xuhong", "Yu, Lei", "Dou, Dejing", "Xiong, Haoyi"),
    title="Beyond Intuition: Rethinking Token Attributions inside Transformers",
    venue="TMLR",
    year=2023,
    kind="article",
    container=_TMLR,
    url="https://openreview.net/forum?id=rm0zIzlhcX",
)
ROLLOUT = Citation(
    key="abnar2020rollout",
    authors=("Abnar, Samira", "Zuidema, Willem"),
    title="Quantifying Attention Flow in Transformers",
    venue="ACL",
    year=2020,
    container="Annual Meeting of the Association for Computational Linguistics (ACL)",
    doi="10.18653/v1/2020.acl-main.385",
    eprint="2005.00928",
)
VIT_EXPLAIN = Citation(
    key="gildenblat2020vitexplain",
    authors=("Gildenblat, Jacob",),
    title="Exploring Explainability for Vision Transformers",
    venue="",
    year=2020,
    kind="misc",
    url="https://jacobgil.github.io/deeplearning/vision-transformer-explainability",
)
CHEFER_LRP = Citation(
    key="chefer2021lrp",
    authors=("Chefer, Hila", "Gur, Shir", "Wolf, Lior"),
    title="Transformer Interpretability Beyond Attention Visualization",
    venue="CVPR",
    year=2021,
    container=_CVPR,
    doi="10.1109/CVPR46437.2021.00084",
    eprint="2012.09838",
)
CHEFER = Citation(
    key="chefer2021generic",
    authors=("Chefer, Hila", "Gur, Shir", "Wolf, Lior"),
    title="Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder Transformers",
    venue="ICCV",
    year=2021,
    container=_ICCV,
    doi="10.1109/ICCV48922.2021.00045",
    eprint="2103.15679",
)
AGCAM = Citation(
    key="leem2024agcam",
    authors=("Leem, Saebom", "Seo, Hyunseok"),
    title="Attention Guided CAM: Visual Explanations of Vision Transformer Guided by Self-Attention",
    venue="AAAI",
    year=2024,
    container="AAAI Conference on Artificial Intelligence",
    doi="10.1609/aaai.v38i4.28077",
    eprint="2402.04563",
)
LEGRAD = Citation(
    key="bousselham2025legrad",
    authors=(
        "Bousselham, Walid",
        "Boggust, Angie",
        "Chaybouti, Sofian",
        "Strobelt, Hendrik",
        "Kuehne, Hilde",
    ),
    title="LeGrad: An Explainability Method for Vision Transformers via Feature Formation Sensitivity",
    venue="ICCV",
    year=2025,
    container=_ICCV,
    eprint="2404.03214",
)
GRADSAM = Citation(
    key="barkan2021gradsam",
    authors=(
        "Barkan, Oren",
        "Hauon, Edan",
        "Caciularu, Avi",
        "Katz, Ori",
        "Malkiel, Itzik",
        "Armstrong, Omri",
        "Koenigstein, Noam",
    ),
    title="Grad-SAM: Explaining Transformers via Gradient Self-Attention Maps",
    venue="CIKM",
    year=2021,
    container="ACM International Conference on Information and Knowledge Management (CIKM)",
    doi="10.1145/3459637.3482126",
    eprint="2204.11073",
)
CLIP_ES = Citation(
    key="lin2023clipes",
    authors=(
        "Lin, Yuqi",
        "Chen, Minghao",
        "Wang, Wenxiao",
        "Wu, Boxi",
        "Li, Ke",
        "Lin, Binbin",
        "Liu, Haifeng",
        "He, Xiaofei",
    ),
    title="CLIP Is Also an Efficient Segmenter: A Text-Driven Approach for Weakly Supervised Semantic Segmentation",
    venue="CVPR",
    year=2023,
    container=_CVPR,
    eprint="2212.09506",
)
MASKCLIP = Citation(
    key="zhou2022maskclip",
    authors=("Zhou, Chong", "Loy, Chen Change", "Dai, Bo"),
    title="Extract Free Dense Labels from CLIP",
    venue="ECCV",
    year=2022,
    container="European Conference on Computer Vision (ECCV)",
    eprint="2112.01071",
)
CLIP_SURGERY = Citation(
    key="li2025clipsurgery",
    authors=("Li, Yi", "Wang, Hualiang", "Duan, Yiqun", "Zhang, Jiheng", "Li, Xiaomeng"),
    title="A Closer Look at the Explainability of Contrastive Language-Image Pre-training",
    venue="Pattern Recognition",
    year=2025,
    kind="article",
    doi="10.1016/j.patcog.2025.111409",
    eprint="2304.05653",
)
COCA = Citation(
    key="yu2022coca",
    authors=(
        "Yu, Jiahui",
        "Wang, Zirui",
        "Vasudevan, Vijay",
        "Yeung, Legg",
        "Seyedhosseini, Mojtaba",
        "Wu, Yonghui",
    ),
    title="CoCa: Contrastive Captioners are Image-Text Foundation Models",
    venue="TMLR",
    year=2022,
    kind="article",
    container=_TMLR,
    eprint="2205.01917",
)
PNP_VQA = Citation(
    key="tiong2022pnpvqa",
    authors=("Tiong, Anthony Meng Huat", "Li, Junnan", "Li, Boyang", "Savarese, Silvio", "Hoi, Steven C. H."),
    title="Plug-and-Play VQA: Zero-shot VQA by Conjoining Large Pretrained Models with Zero Training",
    venue="Findings of EMNLP",
    year=2022,
    container="Findings of the Association for Computational Linguistics: EMNLP 2022",
    doi="10.18653/v1/2022.findings-emnlp.67",
    eprint="2210.08773",
)
OMNIXAI = Citation(
    key="yang2022omnixai",
    authors=("Yang, Wenzhuo", "Le, Hung", "Laud, Tanmay", "Savarese, Silvio", "Hoi, Steven C. H."),
    title="OmniXAI: A Library for Explainable AI",
    venue="",
    year=2022,
    kind="misc",
    eprint="2206.01612",
)
BLIP2 = Citation(
    key="li2023blip2",
    authors=("Li, Junnan", "Li, Dongxu", "Savarese, Silvio", "Hoi, Steven"),
    title=("BLIP-2: Bootstrapping Language-Image Pre-training with Frozen Image Encoders and Large Language Models"),
    venue="ICML",
    year=2023,
    container=_ICML,
    eprint="2301.12597",
)
TAXONOMY = Citation(
    key="wall2026taxonomy",
    authors=("Wall, Casey", "Wang, Longwei", "Rizk, Rodrigue", "Santosh, KC"),
    title=(
        "Grad-CAM for Vision Transformers: A Systematic Taxonomy and Audit of Methodological Ambiguity in "
        "Explainable AI"
    ),
    venue="",
    year=2026,
    kind="misc",
    eprint="2608.05258",
)
"""The audit whose reporting checklist orders the fields of a recipe."""
