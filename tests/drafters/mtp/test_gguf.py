"""The MTP layer of a GGUF file equals the same checkpoint in safetensors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.host.making import resolve_built_in
from betoken.drafters.mtp.checkpoint import MtpRefusedError, check_layer, find_layers, load_layer
from betoken.drafters.mtp.hosting import memory_of
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.drafters.mtp.gguf_files import write_both
from tests.engine.gguf_families import family_model, write_family

TOLERANCES = {"F32": 1e-6, "Q8_0": 0.01, "Q4_1": 0.2}
"""Tolerances by type, for numbers of about 0.3. Norms are stored with 1 added."""


@pytest.mark.parametrize(
    ("architecture", "type_name"), [("qwen35", "F32"), ("qwen35", "Q8_0"), ("qwen35moe", "F32"), ("qwen35moe", "Q4_1")]
)
def test_the_mtp_layer_of_a_gguf_file_is_that_of_the_checkpoint(tmp_path, architecture, type_name):
    path, folder = write_both(tmp_path, architecture, type_name)
    check_layer(find_layers(path, None)[0])
    ours, theirs = [load_layer(find_layers(model, None)[0], torch.float32).state_dict() for model in (path, folder)]
    names = [name for name in theirs if name.startswith("layers.")]
    assert len(names) > 12 and names == [name for name in ours if name.startswith("layers.")]
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], atol=TOLERANCES[type_name], rtol=0.0, msg=name)


def test_a_gguf_file_with_an_mtp_layer_has_the_drafter_built_in(tmp_path):
    path, folder = write_both(tmp_path, "qwen35")
    settings = [
        VerifyWorkerSettings(model=model, dtype="float32", attached_drafters="builtin") for model in (path, folder)
    ]
    assert [resolve_built_in(one) for one in settings] == [("mtp",)] * 2
    assert memory_of(settings[0]).page_bytes == memory_of(settings[1]).page_bytes > 0


def test_a_gguf_file_without_an_mtp_layer_is_refused_by_the_drafters_name(tmp_path):
    path = write_family(tmp_path / "plain.gguf", "qwen35", family_model("qwen35"))
    settings = VerifyWorkerSettings(model=path, attached_drafters="mtp")
    with pytest.raises(
        FailedPreconditionError, match=r"mtp: .*plain\.gguf: it holds no MTP tensors, blk\.2\.nextn\.\*"
    ):
        memory_of(settings)
    llama = write_family(tmp_path / "llama.gguf", "llama", family_model("llama"))
    with pytest.raises(FailedPreconditionError, match="model_type: 'llama': must be one of qwen3_next"):
        memory_of(settings.model_copy(update={"model": llama}))
    assert resolve_built_in(SimpleNamespace(**dict(settings) | {"attached_drafters": ("builtin",)})) == ()


def test_an_unknown_tensor_of_a_gguf_mtp_layer_is_refused_by_name(tmp_path):
    path, _ = write_both(tmp_path, "qwen35", **{"blk.2.nextn.other.weight": np.zeros(4, np.float32)})
    with pytest.raises(MtpRefusedError, match=r"blk\.2\.nextn\.other\.weight' has no place in MtpModel"):
        find_layers(path, None)[0]
