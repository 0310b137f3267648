"""Damaged inputs, full disks and interruptions: a clear error, and nothing half-written."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megalatent import platform

platform.install()

from megalatent.checkpoint import convert  # noqa: E402
from megalatent.checkpoint.reader import SafetensorsReader, check_manifest  # noqa: E402
from megalatent.cli import main  # noqa: E402
from megalatent.errors import UserError  # noqa: E402
from tests.checkpoint import models  # noqa: E402
from tests.checkpoint.test_mistakes import refused  # noqa: E402
from tests.unprivileged import open_folder, run_as_nobody  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of our own in `hf`, with a manifest in `export`, and in Megatron's form."""
    folder = tmp_path_factory.mktemp("models")
    models.save_own(folder / "hf", fusion="gated", num_hidden_layers=4)
    convert.from_hf(folder / "hf", folder / "megatron")
    convert.to_hf(folder / "megatron", folder / "export", max_shard=40_000)
    return folder


@pytest.fixture
def export(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "export", tmp_path / "export"))


def test_a_changed_file_of_an_export(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = sorted(export.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert "another SHA-256" in refused(capsys, "from-hf", export, export.parent / "out")
    shard.write_bytes(data[:-1])
    assert f"{len(data) - 1} bytes and had {len(data)}" in refused(
        capsys, "from-hf", export, export.parent / "out"
    )
    shard.unlink()
    assert f"{shard.name} is missing" in refused(capsys, "from-hf", export, export.parent / "out")


def test_damage_without_a_manifest(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (export / "conversion.json").unlink()
    out = export.parent / "out"
    shards = sorted(export.glob("*.safetensors"))
    whole = shards[0].read_bytes()
    for data in (whole[:-1], whole[:4], b"", b"\xff" * 8 + whole[8:], whole + b"x"):
        shards[0].write_bytes(data)
        assert "truncated or damaged" in refused(capsys, "from-hf", export, out)
    shards[0].write_bytes(whole)
    index = export / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["model.norm.weight"] = shards[-1].name
    index.write_text(json.dumps(listed))
    assert "model.norm.weight is not in" in refused(capsys, "from-hf", export, out)
    index.write_text(index.read_text()[:100])
    assert "index.json is damaged" in refused(capsys, "from-hf", export, out)
    index.unlink()
    assert "no model.safetensors" in refused(capsys, "from-hf", export, out)
    (export / "config.json").write_text("{")
    assert "not valid JSON" in refused(capsys, "from-hf", export, out)


def test_a_checkpoint_that_was_being_written(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron writes the tensors first, then `.metadata`, then the tracker."""
    folder = Path(shutil.copytree(made / "megatron", tmp_path / "megatron"))
    (folder / "conversion.json").unlink()
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text("7")
    assert "iter_0000007 has no .metadata" in refused(capsys, "to-hf", folder, tmp_path / "out")
    tracker.write_text("seven")
    assert "holds 'seven', no iteration" in refused(capsys, "to-hf", folder, tmp_path / "out")
    tracker.write_bytes(b"\xff7")
    assert r"holds '\\xff7', no iteration" in refused(capsys, "to-hf", folder, tmp_path / "out")
    tracker.unlink()
    assert "has no .metadata" in refused(capsys, "to-hf", folder, tmp_path / "out")
    (folder / "release" / ".metadata").unlink()
    assert "has no .metadata" in refused(capsys, "to-hf", folder / "release", tmp_path / "out")


def test_a_checkpoint_that_may_not_be_read(made: Path) -> None:
    """Nothing is said of damage."""
    with open_folder() as folder:
        shutil.copytree(made / "megatron", folder / "megatron")
        (folder / "megatron" / "conversion.json").unlink()
        (file,) = (folder / "megatron" / "release").glob("*.distcp")
        for path in (file, file.parent / ".metadata"):
            path.chmod(0)
            arguments = ["convert", "to-hf", str(folder / "megatron"), str(folder / "out")]
            status, said = run_as_nobody(arguments)
            assert status == 2
            assert f"{path}: permission denied" in said


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": ["0", "8"]},
        {"data_offsets": [0, 4, 8]},
        {"data_offsets": [0, 4]},
        {"data_offsets": [4, 4 + 4 * 32]},
        {"data_offsets": [-8, 4 * 32 - 8]},
        {"shape": None},
        {"shape": [32, 1.0]},
        {"dtype": "F16"},
        {"dtype": ["F32"]},
        {},
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself(tmp_path: Path, change: dict[str, Any]) -> None:
    entry = {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}
    after = {**entry, "data_offsets": [64, 192]}  # overlaps
    tensors = {"a": {**entry, **change}} if change else {"a": entry, "b": after}
    header = json.dumps(tensors).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(192 if not change else 128))
    with pytest.raises(UserError, match="its header cannot be read"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["[]", '{"files": 3}', '{"files": {"config.json": 3}}', '{"files": {"config.json": {}}}'],
)
def test_a_damaged_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "conversion.json").write_text(text)
    with pytest.raises(UserError, match=r"conversion\.json is damaged"):
        check_manifest(tmp_path)


def test_a_run_may_go_on_in_the_folder_of_an_import(made: Path, tmp_path: Path) -> None:
    """Only what is converted must be what was written."""
    folder = Path(shutil.copytree(made / "megatron", tmp_path / "megatron"))
    shutil.copytree(folder / "release", folder / "iter_0000007")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    (folder / "model.yaml").write_text("mine")
    convert.to_hf(folder, tmp_path / "out")
    (file,) = (folder / "release").glob("*.distcp")
    file.write_bytes(file.read_bytes() + b"x")
    convert.to_hf(folder, tmp_path / "again")
    with pytest.raises(UserError, match="or delete conversion"):
        convert.to_hf(folder / "release", tmp_path / "third")


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of `size` bytes at `folder`; a limit of the size of files where mounting is
    not allowed."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()) == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if mounted and libc.umount2(os.fsencode(folder), 2):
            raise OSError(ctypes.get_errno(), "umount")


@pytest.mark.parametrize("direction", ["to-hf", "from-hf"])
def test_a_disk_that_fills_up(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    """Others write too: there was room when the conversion began."""
    source = made / ("megatron" if direction == "to-hf" else "export")
    disk = tmp_path / "disk"
    with small_disk(disk, 160_000):
        earlier = disk / "out"
        earlier.mkdir()
        (earlier / "conversion.json").write_text('{"files": {}}')
        assert "GB free and the conversion needs" in refused(
            capsys, direction, source, earlier, "--overwrite"
        )
        usage = shutil.disk_usage(disk)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**9))
        line = refused(capsys, direction, source, earlier, "--overwrite")
        assert "No space left" in line or "File too large" in line
        assert "nothing was written to" in line
        assert [path.name for path in earlier.iterdir()] == ["conversion.json"]


def test_an_interrupted_import_starts_anew(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    fill = SafetensorsReader.fill

    def stop(reader: SafetensorsReader, name: str, target: Tensor) -> None:
        if name.startswith("model.layers.2."):
            raise KeyboardInterrupt  # inside torch's writer
        fill(reader, name, target)

    monkeypatch.setattr(SafetensorsReader, "fill", stop)
    assert main(["convert", "from-hf", str(made / "export"), str(out)]) == 130
    assert not out.exists()
    monkeypatch.undo()
    assert main(["convert", "from-hf", str(made / "export"), str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    back = tmp_path / "back"
    convert.to_hf(out, back)
    found, wanted = models.weights(back), models.weights(made / "hf")
    assert found.keys() == wanted.keys()
    assert all((found[name] == tensor).all() for name, tensor in wanted.items())


@pytest.mark.full
def test_memory_is_that_of_the_largest_group(tmp_path: Path) -> None:
    """Of a model larger than that, in fresh processes, as the kernel counts it."""
    from tools.bench_convert import make_llama, measure

    (tmp_path / "llama").mkdir()
    sizes = make_llama(tmp_path / "llama", layers=6, hidden=1536, vocab=65_536, dtype="fp32")
    allowed = sizes.largest + 300 * 10**6
    assert sizes.total > allowed
    for direction, source, out in (
        ("from-hf", "llama", "megatron"),
        ("to-hf", "megatron", "back"),
        ("to-hf-bf16", "megatron", "rounded"),
    ):
        found = measure(direction, tmp_path / source, tmp_path / out)
        assert found.peak - found.before <= allowed, direction
