from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from betoken.training.models import DRAFT, TARGET, Shape, build_model, num_parameters, save_model
from betoken.training.tokenizer import save_tokenizer, train_tokenizer


def test_the_pair_has_the_sizes_it_is_known_for() -> None:
    target, draft = (build_model(shape, seed=0) for shape in (TARGET, DRAFT))
    assert 13e6 < num_parameters(target) < 16e6
    assert 0.8e6 < num_parameters(draft) < 1.1e6
    assert target.config.head_dim == 64 and target.config.max_position_embeddings == 1024


def test_the_start_is_seeded(shape: Shape) -> None:
    one, same, other = (build_model(shape, seed) for seed in (0, 0, 1))
    assert torch.equal(one.model.embed_tokens.weight, same.model.embed_tokens.weight)
    assert not torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_a_saved_folder_loads_as_any_hugging_face_model(shape: Shape, tmp_path: Path) -> None:
    model = build_model(shape, seed=0)
    save_model(model, tmp_path)
    save_tokenizer(train_tokenizer(["def f():\n    pass\n"], vocab_size=300), tmp_path, shape.max_positions)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    assert loaded.dtype == torch.bfloat16 and model.dtype == torch.float32
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16()), name
    assert loaded.generation_config.eos_token_id == loaded.config.eos_token_id == tokenizer.eos_token_id == 0
    assert not loaded.generation_config.do_sample
    assert tokenizer.model_max_length == shape.max_positions
    assert tokenizer("def f").input_ids and tokenizer.decode(tokenizer("def f").input_ids) == "def f"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "# user:\nhi\n# assistant:\n"
