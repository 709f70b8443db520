"""A model whose layers are shared by ranks: the bits of one process, for every family, format and number of ranks."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed
from transformers import AutoConfig, AutoModelForCausalLM

from betoken.engine.batch import Segment, build_batch
from betoken.engine.bring_up.load import load_runner, runner_of, weight_bytes
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError, RankLostError
from betoken.engine.ranks import commands
from betoken.engine.ranks.columns import columns_of
from betoken.engine.ranks.joining import join
from betoken.engine.ranks.layers import gather_columns
from betoken.engine.ranks.loading import load_part
from betoken.engine.runner import ModelRunner
from betoken.engine.snapshots import StateCopy
from betoken.engine.state_table import OwnState, PageList
from betoken.engine.tree import KeptPath
from betoken.engine.weights.layers import grouped_bytes
from tests.engine import quantized_files as files
from tests.engine.gguf_files import tiny_model, write_gguf
from tests.engine.rank_threads import QUANTIZED, bits_of, compile_one_at_a_time, config_of, joined, shared_runner
from tests.engine.tiny import save_tiny
from tests.products import slow
from tests.router.harness import byte_tokenizer_json

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}
WIDE |= {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_head": 4,
    "n_embd": 256,
    "n_layer": 2,
}


def check_equal_bits(config: EngineConfig, size: int) -> ModelRunner:
    alone = load_runner(config)
    with shared_runner(config, size) as shared:
        for ours, theirs in zip(bits_of(shared), bits_of(alone), strict=True):
            assert torch.equal(ours, theirs)
        assert shared.numerics == alone.numerics
        return shared


IN_SOME_TYPE = [
    *("llama-3-float32", "mixtral-2-bfloat16", "gemma2-2-float32", "qwen3_5-2-bfloat16", "falcon_h1-2-float32"),
    *("gpt2-2-bfloat16", "gpt_oss-2-bfloat16", "lfm2-2-float32"),
]
FURTHER = ["llama-4-bfloat16", "mixtral-2-float32", "gemma2-2-bfloat16", "qwen3_5-2-float32", "falcon_h1-3-bfloat16"]
FURTHER += ["qwen3_next-2-bfloat16", "granite_swa-2-bfloat16", "qwen3-2-bfloat16", "mamba2-2-float32"]


@pytest.mark.parametrize("case", [*IN_SOME_TYPE, *slow(*FURTHER)])
def test_a_model_has_the_same_bits_for_any_number_of_ranks(case: str, tmp_path: Path) -> None:
    family, size, dtype = case.split("-")
    check_equal_bits(config_of(save_tiny(tmp_path, family), dtype), int(size))


def test_a_model_on_two_ranks_passes_the_check_at_load(tmp_path: Path) -> None:
    check_equal_bits(config_of(save_tiny(tmp_path, "llama"), "bfloat16", self_check=True), 2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_model_has_the_same_bits_on_ranks(name: str, size: int, tmp_path: Path) -> None:
    files.write_quantized(Path(save_tiny(tmp_path, "llama")), *QUANTIZED[name])
    check_equal_bits(config_of(str(tmp_path)), size)


@pytest.mark.parametrize(("activations", "size"), [("exact", 2), ("exact", 4), ("int8", 2)])
def test_a_gguf_model_with_tied_layers_has_the_same_bits_on_ranks(activations: str, size: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_K", tiny_model(is_tied=True))
    config = config_of(path, activations=activations, self_check=activations == "int8")
    shared = check_equal_bits(config, size)
    assert shared.weight_bytes < (0.6 if size == 2 else 0.4) * load_runner(config).weight_bytes
    assert shared.weight_bytes == weight_bytes(shared.parts._model)


def num_bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def check_bytes_read(config: EngineConfig, share: float) -> None:
    """A rank of two reads at most this share of what one process reads, and holds no more than that."""
    with joined(2) as groups:
        counts, sizes = [], []
        for ranks in (None, *groups):
            start = num_bytes_read()
            model, info = load_part(replace(config, ranks=ranks), lambda stage, fraction: None)
            counts.append(num_bytes_read() - start)
            sizes.append((weight_bytes(model) + grouped_bytes(model), info.num_parameters))
    assert max(counts[1:]) < share * counts[0] and max(size for size, _ in sizes[1:]) < share * sizes[0][0]
    assert len({num_parameters for _, num_parameters in sizes}) == 1


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_a_rank_reads_its_columns_of_a_checkpoint_alone(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **WIDE)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    check_bytes_read(config_of(str(tmp_path), "bfloat16"), 0.6)


@pytest.mark.parametrize("type_name", ["Q8_0", "BF16"])
def test_a_rank_reads_its_rows_of_a_gguf_file_alone(type_name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "wide.gguf", type_name, tiny_model(is_tied=True))
    check_bytes_read(config_of(path, "bfloat16"), 0.62)


def test_a_rank_after_rank_0_reads_no_tokenizer(tmp_path: Path) -> None:
    config = config_of(save_tiny(tmp_path, "llama"))
    (Path(config.model) / "tokenizer.json").write_text(byte_tokenizer_json())
    with joined(2) as groups:
        infos = [load_part(replace(config, ranks=ranks), lambda stage, fraction: None)[1] for ranks in groups]
    assert [bool(info.tokenizer_hash) for info in infos] == [True, False]
    assert infos[0].tokenizer_text() and not infos[1].tokenizer_text()


@pytest.mark.slow
def test_a_compiled_model_has_the_same_bits_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_one_at_a_time(monkeypatch)
    shared = check_equal_bits(config_of(save_tiny(tmp_path, "llama"), "bfloat16", compile="on", self_check=True), 2)
    assert shared.is_compiled


@pytest.mark.gpu
def test_gathers_are_recorded_in_the_graphs_of_a_gpu(tmp_path: Path) -> None:
    """A rank by itself, since NCCL does not run two on one device."""
    config = config_of(save_tiny(tmp_path, "llama"), "bfloat16", device="cuda:0", compile="auto")
    group = join(0, 1, distributed.HashStore(), torch.device("cuda:0"))
    alone = load_runner(config)
    ranked = replace(config, ranks=group)
    shared = runner_of(ranked, *load_part(ranked, lambda stage, fraction: None))
    assert shared.is_compiled == alone.is_compiled
    for ours, theirs in zip(bits_of(shared), bits_of(alone), strict=True):
        assert torch.equal(ours, theirs)


def test_shared_parts_of_a_model_run_on_all_ranks(tmp_path: Path) -> None:
    config = config_of(save_tiny(tmp_path, "llama"))
    alone, states, ids = load_runner(config).parts, torch.randn(2, 3, 64), torch.tensor([[0, 50, 51, 100]])
    with shared_runner(config, 2) as shared, torch.inference_mode():
        assert torch.equal(shared.parts.head(states), alone.head(states))
        assert torch.equal(shared.parts.embed(ids), alone.embed(ids))


@pytest.mark.parametrize(("num_rows", "is_shared"), [(3, True), (3, False), (400_000, True)])
def test_columns_are_gathered_in_order_if_the_last_rank_has_fewer(num_rows: int, is_shared: bool) -> None:
    whole = torch.arange(num_rows * 7).remainder(251).to(torch.bfloat16).view(1, num_rows, 7)  # the last takes gloo
    found: dict[int, Tensor] = {}
    with joined(3, is_shared=is_shared) as groups:

        def gather(rank: int) -> None:
            columns = columns_of(groups[rank], 7)
            assert columns is not None
            found[rank] = gather_columns(whole[..., columns.range], groups[rank], columns)

        threads = [threading.Thread(target=gather, args=(rank,), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(found) == 3 and all(torch.equal(each, whole) for each in found.values())


def test_a_layer_with_fewer_columns_than_ranks_can_share_stays_whole() -> None:
    with joined(2) as groups:
        assert columns_of(groups[0], 1) is None
        assert [columns_of(group, 1024)[:2] for group in groups] == [(0, 512), (512, 1024)]  # type: ignore[index]


def test_a_message_longer_than_one_exchange_arrives_whole() -> None:
    received: list[Any] = []
    with joined(2) as groups:
        for length in (0, 1023, 1024, 5000):
            message = np.arange(length, dtype=np.int32)
            thread = threading.Thread(target=lambda: received.append(groups[1].receive()), daemon=True)
            thread.start()
            groups[0].send(message)
            thread.join(60)
            assert np.array_equal(received.pop(), message)


def test_ranks_with_other_weights_are_rejected() -> None:
    faults: list[BaseException] = []
    with joined(2) as groups:

        def check(rank: int) -> None:
            with pytest.raises(ModelRefusedError, match="weights of rank 1 differ from rank 0's") as caught:
                groups[rank].check_equal("weights", [f"fingerprint {rank}"])
            faults.append(caught.value)

        threads = [threading.Thread(target=check, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert any("fingerprint 1; not 'fingerprint 0'" in str(fault) for fault in faults) and len(faults) == 2


def test_a_forward_that_fails_on_rank_0_ends_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(save_tiny(tmp_path, "llama"))
    with joined(1) as groups:
        group, reported = groups[0], []
        group.on_lost = reported.append
        assert group.fail(LookupError("an internal error")) is group.fail(RuntimeError("a later one"))
        assert [str(error) for error in reported] == ["LookupError: an internal error"]
        with pytest.raises(RankLostError, match="LookupError: an internal error"):
            group.least(1)
    with pytest.raises(ValueError, match="wrap_linear"):
        EngineConfig(config.model, ranks=group, wrap_linear=lambda path, layer, adapters: layer)


def test_commands_to_ranks_hold_the_whole_batch() -> None:
    segments = [Segment([3, 4], 2, [5, 6, 7], 2, [-1, -1, 0]), Segment([9], 0, [1], 1, adapter=2)]
    batch = build_batch(segments, 16, 64)
    batch.state_columns = np.arange(8, dtype=np.int32).reshape(4, 2)
    command, parts = commands.unpack(commands.pack_batch(batch))
    found = commands.unpack_batch(parts)
    assert command is commands.Command.FORWARD
    for name in ("token_ids", "positions", "logit_rows", "num_segments", "has_trees", "adapters"):
        assert getattr(found, name) == getattr(batch, name)
    assert np.array_equal(found.layout, batch.layout) and np.array_equal(found.state_columns, batch.state_columns)


def test_commands_to_ranks_hold_paths_and_copies() -> None:
    paths = [KeptPath(PageList([4, 5], OwnState(3)), 17, [1, 2]), KeptPath([8], 0, [])]
    found = commands.unpack_paths(commands.unpack(commands.pack_paths(paths))[1])
    assert [(list(path.page_ids), path.tree_start, path.nodes) for path in found] == [
        ([4, 5], 17, [1, 2]),
        ([8], 0, []),
    ]
    assert found[0].page_ids.state.index == 3 and found[1].page_ids.state is None  # type: ignore[attr-defined]
    copies = [StateCopy(1, 2, 30, True), StateCopy(4, 5, 60, False)]
    assert commands.unpack_copies(commands.unpack(commands.pack_copies(copies))[1]) == copies
