"""A draft model with an untrained mask token, which the exactness matrix drafts with."""

from pathlib import Path

import pytest

from betoken.bench.pard import make_pard
from betoken.engine.config import EngineConfig
from betoken.engine.weights.loading import load_model
from tests.engine.tiny import save_tiny


def test_a_pard_checkpoint_has_the_weights_of_its_draft_model_and_a_mask_token(tmp_path: Path) -> None:
    draft = save_tiny(tmp_path / "draft", "llama")
    names = [draft, *(make_pard(draft, tmp_path / "out" / "pard") for _ in range(2))]
    models = [load_model(EngineConfig(name, dtype="float32"), lambda stage, fraction: None) for name in names]
    assert [info.mask_token_id for _, info in models] == [None, 100, 100]
    first, *others = [model.state_dict() for model, _ in models]
    assert all(first[name].equal(other[name]) for other in others for name in first)


def test_a_gguf_file_has_no_mask_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draft some.gguf: a GGUF file names no mask token"):
        make_pard("some.gguf", tmp_path / "pard")
