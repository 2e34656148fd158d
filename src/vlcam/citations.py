"""Who published what: authors, title, venue and year of the papers behind the named recipes."""

GRADCAM = (
    "Selvaraju, Cogswell, Das, Vedantam, Parikh, Batra. Grad-CAM: Visual Explanations from Deep Networks via "
    "Gradient-based Localization. ICCV 2017"
)
BLIP = (
    "Li, Li, Xiong, Hoi. BLIP: Bootstrapping Language-Image Pre-training for Unified Vision-Language "
    "Understanding and Generation. ICML 2022"
)
ALBEF = (
    "Li, Selvaraju, Gotmare, Joty, Xiong, Hoi. Align before Fuse: Vision and Language Representation Learning "
    "with Momentum Distillation. NeurIPS 2021"
)
PLUS_PLUS = (
    "Chattopadhay, Sarkar, Howlader, Balasubramanian. Grad-CAM++: Generalized Gradient-based Visual Explanations for "
    "Deep Convolutional Networks. WACV 2018"
)
XGRADCAM = (
    "Fu, Hu, Dong, Guo, Gao, Li. Axiom-based Grad-CAM: Towards Accurate Visualization and Explanation of CNNs. "
    "BMVC 2020"
)
HIRESCAM = (
    "Draelos, Carin. Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural networks. "
    "arXiv:2011.08891, 2020"
)
LAYERCAM = (
    "Jiang, Zhang, Hou, Cheng, Wei. LayerCAM: Exploring Hierarchical Class Activation Maps for Localization. "
    "IEEE Transactions on Image Processing 2021"
)
EIGENCAM = "Muhammad, Yeasin. Eigen-CAM: Class Activation Map using Principal Components. IJCNN 2020"
PGC = "Gildenblat and contributors. pytorch-grad-cam. 2021"
FINERCAM = (
    "Zhang, Gu, Lee, Berger-Wolf, Chao. Finer-CAM: Spotting the Difference Reveals Finer Details for Visual "
    "Explanation. CVPR 2025"
)
GSCORECAM = "Chen, Li, Biaz, Bui, Nguyen. gScoreCAM: What Objects Is CLIP Looking At? ACCV 2022"
GRADECLIP = "Zhao, Wang, Zeng, Zhao, Chan. Gradient-based Visual Explanation for Transformer-based CLIP. ICML 2024"
SCORECAM = (
    "Wang, Wang, Du, Yang, Zhang, Ding, Mardziel, Hu. Score-CAM: Score-Weighted Visual Explanations for Convolutional "
    "Neural Networks. CVPR Workshops 2020"
)
ABLATIONCAM = (
    "Desai, Ramaswamy. Ablation-CAM: Visual Explanations for Deep Convolutional Network via Gradient-free "
    "Localization. WACV 2020"
)
RECIPROCAM = "Byun, Lee. ViT-ReciproCAM: Gradient and Attention-Free Visual Explanations. arXiv:2310.02588, 2023"
TRANSITION = (
    "Yuan, Li, Xiong, Dou. Explaining Information Flow Inside Vision Transformers Using Markov Chain. NeurIPS 2021 "
    "Workshop on Explainable AI Approaches for Debugging and Diagnosis"
)
BEYOND = "Chen, Li, Yu, Dou, Xiong. Beyond Intuition: Rethinking Token Attributions inside Transformers. TMLR 2023"
ROLLOUT = "Abnar, Zuidema. Quantifying Attention Flow in Transformers. ACL 2020"
VIT_EXPLAIN = "Gildenblat. Exploring Explainability for Vision Transformers (vit-explain). 2020"
CHEFER_LRP = "Chefer, Gur, Wolf. Transformer Interpretability Beyond Attention Visualization. CVPR 2021"
CHEFER = (
    "Chefer, Gur, Wolf. Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder "
    "Transformers. ICCV 2021"
)
AGCAM = "Leem, Seo. Attention Guided CAM: Visual Explanations of Vision Transformer Guided by Self-Attention. AAAI 2024"
LEGRAD = "Bousselham, Boggust, Chaybouti, Strobelt, Kuehne. LeGrad: An Explainability Method for ViTs. ICCV 2025"
GRADSAM = (
    "Barkan, Hauon, Caciularu, Katz, Malkiel, Armstrong, Koenigstein. Grad-SAM: Explaining Transformers via Gradient "
    "Self-Attention Maps. CIKM 2021"
)
CLIP_ES = (
    "Lin, Chen, Wang, Wu, Li, Lin, Liu, He. CLIP Is Also an Efficient Segmenter: A Text-Driven Approach for Weakly "
    "Supervised Semantic Segmentation. CVPR 2023"
)
MASKCLIP = "Zhou, Loy, Dai. Extract Free Dense Labels from CLIP. ECCV 2022"
CLIP_SURGERY = (
    "Li, Wang, Duan, Zhang, Li. A Closer Look at the Explainability of Contrastive Language-Image Pre-training. "
    "Pattern Recognition 2025 (arXiv:2304.05653)"
)
COCA = (
    "Yu, Wang, Vasudevan, Yeung, Seyedhosseini, Wu. CoCa: Contrastive Captioners are Image-Text Foundation Models. "
    "TMLR 2022"
)
PNP_VQA = (
    "Tiong, Li, Li, Savarese, Hoi. Plug-and-Play VQA: Zero-shot VQA by Conjoining Large Pretrained Models with Zero "
    "Training. Findings of EMNLP 2022"
)
OMNIXAI = "Yang, Le, Laud, Savarese, Hoi. OmniXAI: A Library for Explainable AI. arXiv:2206.01612, 2022"
BLIP2 = (
    "Li, Li, Savarese, Hoi. BLIP-2: Bootstrapping Language-Image Pre-training with Frozen Image Encoders and Large "
    "Language Models. ICML 2023"
)
