"""GGUF models in several files, written by the format's own package: all parts are read, and wrong ones are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from betoken.common.gguf import GgufError, find_gguf, read_header


def write(path: Path, num_parts: int = 1) -> list[Path]:
    """A model of three tensors in one file or in three."""
    writer = GGUFWriter(path, "llama", split_max_tensors=0 if num_parts == 1 else 1)
    writer.add_uint32("llama.block_count", 3)
    for place, name in enumerate("xyz"):
        writer.add_tensor(name, np.full(4, place, np.float32))
    close(writer)
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))


def write_part(path: Path, tensor: str, **keys: Any) -> None:
    """One file with keys below `split`."""
    writer = GGUFWriter(path, "llama")
    for key, value in keys.items():
        add: Any = writer.add_string if isinstance(value, str) else writer.add_int32
        add(f"split.{key.replace('_', '.')}", value)
    writer.add_tensor(tensor, np.zeros(4, np.float32))
    close(writer)


def close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_first_part_of_a_gguf_model_has_the_tensors_of_all(tmp_path: Path) -> None:
    paths = write(tmp_path / "a.gguf", num_parts=3)
    assert [path.name for path in paths] == [f"a-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    header = read_header(paths[0])
    assert header.metadata["llama.block_count"] == 3 and [part.path for part in header.parts] == paths[1:]
    assert [(tensor.name, tensor.path) for tensor in header.tensors] == list(zip("xyz", paths, strict=True))
    for place, tensor in enumerate(header.tensors):
        assert np.fromfile(tensor.path, np.float32, 4, offset=tensor.start).tolist() == [place] * 4


def test_missing_parts_of_a_gguf_model_are_named(tmp_path: Path) -> None:
    first, second, third = write(tmp_path / "a.gguf", num_parts=3)
    third.unlink()
    with pytest.raises(GgufError, match=r"a-00001-of-00003.gguf: 1 of 3 parts are missing: a-00003-of-00003.gguf$"):
        read_header(first)
    first.unlink()
    with pytest.raises(GgufError, match=r"is part 2 of 3: name the first part, a-00001-of-00003.gguf"):
        read_header(second)


def test_a_part_with_another_name_is_rejected(tmp_path: Path) -> None:
    first, *_ = write(tmp_path / "a.gguf", num_parts=3)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(GgufError, match=r"split.no = 0 and split.count = 3, .* does not end in -00001-of-00003.gguf"):
        read_header(renamed)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"no": 0, "count": 2}, r"00002-of-00002.gguf: split.no = 0 and split.count = 2: not part 2 of 2 of a-00001"),
        ({"no": 1, "count": 3}, r"split.no = 1 and split.count = 3: not part 2"),
        ({}, r"split.no = 0 and split.count = 0: not part 2"),
        ({"no": 1, "count": "2"}, r"split.count = '2' is not a number of parts"),
        ({"no": -1, "count": 2}, r"split.no = -1 is not a number of parts"),
    ],
)
def test_a_part_of_another_gguf_model_is_rejected(keys: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    write_part(tmp_path / "a-00001-of-00002.gguf", "x", no=0, count=2)
    write_part(tmp_path / "a-00002-of-00002.gguf", "y", **keys)
    with pytest.raises(GgufError, match=complaint):
        read_header(tmp_path / "a-00001-of-00002.gguf")


def test_tensors_of_parts_are_distinct_and_as_many_as_the_first_says(tmp_path: Path) -> None:
    write_part(tmp_path / "a-00001-of-00002.gguf", "x", no=0, count=2, tensors_count=3)
    write_part(tmp_path / "a-00002-of-00002.gguf", "y", no=1, count=2)
    with pytest.raises(GgufError, match=r"split.tensors.count = 3, but the parts hold 2 tensors"):
        read_header(tmp_path / "a-00001-of-00002.gguf")
    write_part(tmp_path / "a-00002-of-00002.gguf", "x", no=1, count=2)
    with pytest.raises(GgufError, match=r"00002-of-00002.gguf: tensor 'x' is in an earlier part"):
        read_header(tmp_path / "a-00001-of-00002.gguf")


def test_a_path_names_a_gguf_file_or_the_only_one_of_a_directory(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None and find_gguf(tmp_path / "nothing.gguf") is None
    path = write(tmp_path / "a.gguf")[0]
    assert find_gguf(path) == find_gguf(tmp_path) == path
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None, "a checkpoint that keeps the file it was made of"


def test_the_parts_in_a_directory_are_one_gguf_model(tmp_path: Path) -> None:
    first, second, _ = write(tmp_path / "a.gguf", num_parts=3)
    assert find_gguf(tmp_path) == first and find_gguf(second) == second
    write(tmp_path / "b.gguf")
    with pytest.raises(GgufError, match=r"holds 2 GGUF files \(a-00001-of-00003.gguf, b.gguf\): name one"):
        find_gguf(tmp_path)
