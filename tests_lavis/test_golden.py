"""The files that the main environment compares transformers with are what LAVIS gives."""

from __future__ import annotations

import make_golden
import numpy as np
from safetensors.torch import load_file


def test_the_golden_twin_is_that_of_lavis():
    module = make_golden.model()
    module.load_state_dict(load_file(make_golden.FOLDER / "model.safetensors"))
    stored = np.load(make_golden.FOLDER / "golden.npz")
    for name, found in make_golden.golden(module).items():
        np.testing.assert_allclose(found, stored[name], atol=1e-6, err_msg=name)
