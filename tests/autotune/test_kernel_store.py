"""Times of local kernels on disk: other devices and versions, broken files, two processes at once, and wiping."""

from __future__ import annotations

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.graphs.nonempty import some
from weaveopt.autotune import device_class, kernel_store
from weaveopt.autotune.kernel_store import KernelStore, LeftKernel
from weaveopt.cli.main import main
from weaveopt.cost_model.timed import KernelShape, KernelTime

DEVICE = {"device": "cpu", "processor": "one", "torch": "2.13.0"}
SHAPE = KernelShape("gemm", "bfloat16", 1500, (5120, 13824), "rc")
TIME = KernelTime(SHAPE, 321.5, 0.03)


def test_what_was_stored_is_read(tmp_path: Path) -> None:
    store = KernelStore(tmp_path / "made" / "here", DEVICE)
    assert store.read().times == {}
    left = LeftKernel(KernelShape("bmm", "float32", 4, (2, 8, 8)), 2.0)
    assert store.add([TIME], [left])
    found = store.read()
    assert found.times == {SHAPE: TIME}
    assert found.is_settled(SHAPE, 100.0) and found.is_settled(left.shape, 2.0)
    assert not found.is_settled(left.shape, 3.0), "a larger budget may have time for it"
    assert store.add([KernelTime(left.shape, 7.0)])
    assert store.read().left == {} and store.read().times.keys() == {SHAPE, left.shape}


def test_other_devices_and_versions_have_times_of_their_own(tmp_path: Path) -> None:
    KernelStore(tmp_path, DEVICE).add([TIME])
    others = [
        {**DEVICE, "processor": "another"}, {**DEVICE, "torch": "2.14.0"}, {**DEVICE, "power_limit_mw": "500000"},
    ]  # fmt: skip
    assert all(KernelStore(tmp_path, other).read().times == {} for other in some(others))
    # Even where a file of another device has this one's name.
    other = KernelStore(tmp_path, others[0])
    KernelStore(tmp_path, DEVICE).path.rename(other.path)
    assert other.read().times == {}


BROKEN = {
    "no JSON": "{", "empty": "", "not this": "[1, 2]", "binary": "\x00\xff", "nested": "[" * 5000,
    "a field is missing": '{"version": 1, "device": {}}',
    "a number that is none": '{"version": 1, "device": {}, "kernels": [{"shape": 3, "us": "x"}]}',
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_empty_and_replaced(name: str, tmp_path: Path) -> None:
    store = KernelStore(tmp_path, DEVICE)
    store.path.write_text(BROKEN[name], encoding="latin-1")
    assert store.read().times == {}
    assert store.add([TIME]) and store.read().times == {SHAPE: TIME}


def test_without_msgspec_nothing_is_known_and_times_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = KernelStore(tmp_path, DEVICE), replace(TIME, shape=replace(SHAPE, size=SHAPE.size + 1))
    store.add([TIME])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "msgspec", None)
        assert store.read().times == {} and not kernel_store.can_read()
        assert store.add([other])
    assert store.read().times == {SHAPE: TIME} and kernel_store.can_read()


def test_a_file_of_another_version_is_empty(tmp_path: Path) -> None:
    store = KernelStore(tmp_path, DEVICE)
    store.add([TIME])
    content = json.loads(store.path.read_text())
    store.path.write_text(json.dumps({**content, "version": kernel_store.VERSION + 1}))
    assert store.read().times == {}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = KernelStore(tmp_path / "file" / "folder", DEVICE)
    assert not store.add([TIME]) and store.read().times == {}


def _add(folder: str, process: int) -> bool:
    store = KernelStore(Path(folder), DEVICE)
    rows = [KernelShape("gemm", "float32", 100 * process + index, (8, 8)) for index in range(20)]
    return all(store.add([KernelTime(shape, 1.0 + process)]) for shape in rows)


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as processes:
        assert list(processes.map(_add, [str(tmp_path)] * 2, (1, 2))) == [True, True]
    assert len(KernelStore(tmp_path, DEVICE).read().times) == 40
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix != ".lock"] == [".json"], "files lie about"


def test_one_command_wipes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    KernelStore(tmp_path, DEVICE).add([TIME])
    (tmp_path / f"{kernel_store.PREFIX}broken{kernel_store.SUFFIX}").write_text("{")
    (tmp_path / "mine.txt").write_text("kept")
    assert main(["tuned", "--cache", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "1 kernel; device cpu, processor one, torch 2.13.0" in shown and "counts as empty" in shown
    assert main(["tuned", "--cache", str(tmp_path), "--wipe"]) == 0
    assert "2 files deleted" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert main(["tuned", "--cache", str(tmp_path / "nowhere")]) == 0


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_store.default_folder() == tmp_path / "weaveopt"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_store.default_folder() == tmp_path / ".cache" / "weaveopt"


def test_a_device_is_told_by_what_its_times_depend_on() -> None:
    two, four = (device_class.device_class("cpu", ranks) for ranks in (2, 4))
    assert two != four and {"processor", "cores", "threads", "torch", "governor"} <= two.keys()
    assert device_class.device_class("cpu", 2) == two
