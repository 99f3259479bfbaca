"""`weaveopt doctor`: what it finds here, and what it says of what is missing."""

from __future__ import annotations

import json
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import weaveopt
from tests.graphs.nonempty import some
from weaveopt import versions
from weaveopt.cli import doctor
from weaveopt.cli.doctor import Check, Status
from weaveopt.cli.main import main
from weaveopt.versions import Supported


def test_a_host_with_everything_is_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in document["checks"]}
    assert document["usable"] is True
    assert set(doctor.NEEDED) <= set(found)
    assert found["torch"]["found"].startswith(metadata.version("torch"))
    assert {"fabric shm", "fabric library", "fabric peer", "fabric multimem", "fabric nvshmem"} <= set(found)
    assert found["fabric tcp"]["status"] == "ok" and "several hosts" in found["fabric tcp"]["found"]
    assert all(check["status"] != "missing" or check["advice"] for check in document["checks"])


def test_the_table_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(check.name in out for check in doctor.examine())
    assert out.rstrip().splitlines()[-1].startswith("usable")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_an_old_version_is_named_with_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.9.1" if name == package else real(name))
    code = main(["doctor", "--format", "json"])
    check = next(c for c in json.loads(capsys.readouterr().out)["checks"] if c["name"] == package)
    assert (check["status"], check["found"]) == ("missing", "2.9.1")
    least = {supported.name: supported.least for supported in versions.SUPPORTED}
    assert f">={least[package]}" in check["advice"]
    assert code == 1


def test_without_the_native_part_it_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if "_native" in name else real(name))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "pip install" in out
    assert "not usable yet" in out


@pytest.mark.parametrize(
    ("gpus", "archs", "has_code", "status", "found", "advice"),
    [
        (0, None, False, Status.NOTE, "left out of this build", ""),
        (2, None, False, Status.NOTE, "left out of this build", "WEAVE_CUDA_ARCHS='89' pip install"),
        (0, "80;90;100+PTX", False, Status.OK, "built for 80;90;100+PTX", ""),
        (2, "80+PTX", True, Status.OK, "built for 80+PTX", ""),
        (2, "90+PTX", False, Status.NOTE, "built for 90+PTX, not for every GPU here", "WEAVE_CUDA_ARCHS='89' pip"),
    ],
)
def test_the_cuda_part_is_held_against_the_gpus_that_are_here(
    monkeypatch: pytest.MonkeyPatch, gpus: int, archs: str | None, has_code: bool, status: Status, found: str,
    advice: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    native = SimpleNamespace(has_cuda=archs is not None, CUDA_ARCHS=archs, has_code=lambda index: has_code)
    monkeypatch.setattr(weaveopt, "_native", native, raising=False)
    check = doctor._cuda_part()
    assert (check.status, check.found) == (status, found)
    assert advice in check.advice and bool(advice) is bool(check.advice)


def test_little_shared_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SHM_COMFORT_BYTES", 1 << 60)
    check = next(c for c in doctor.examine() if c.name == "shared memory")
    assert (check.status, "--shm-size" in check.advice) == (Status.NOTE, True)


def test_more_ranks_than_cores_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4096")
    check = next(c for c in doctor.examine() if c.name == "cores")
    assert check.status is Status.NOTE
    assert "4096 ranks" in check.found


@pytest.mark.parametrize(
    ("found", "minimum", "enough"),
    [("2.11.0+cu130", "2.11", True), ("2.9.1", "2.11", False), ("5.17.0.dev0", "5.17", True), ("5.9", "5.17", False)],
)
def test_versions_compare_by_number(found: str, minimum: str, enough: bool) -> None:
    assert versions.at_least(found, minimum) is enough


@pytest.mark.parametrize(
    ("package", "found", "note"),
    [
        ("torch", "99.1.0+cu999", "newer than any that was tested"),
        ("transformers", "99.0.0", "newer than any that was tested"),
        ("accelerate", "1.11.0", "never tested"),
        ("python", "3.99.0", "newer than any that was tested"),
    ],
)
def test_a_version_that_was_never_tested_is_noted(
    package: str, found: str, note: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: found if name == package else real(name))
    if package == "python":
        monkeypatch.setattr(doctor.platform, "python_version", lambda: found)
    code = main(["doctor", "--format", "json"])
    check = next(c for c in json.loads(capsys.readouterr().out)["checks"] if c["name"] == package)
    assert check["status"] == "note" and check["found"].startswith(f"{found}: {note}")
    assert "make test" in check["advice"]
    assert code == 0, "what was never tested may be used"


@pytest.mark.parametrize("package", versions.SUPPORTED, ids=lambda package: package.name)
def test_a_tested_version_is_no_note(package: Supported) -> None:
    assert all(versions.untested(package, f"{release}.7") is None for release in some(package.tested))


def test_long_text_is_folded_not_cut() -> None:
    text = doctor.text((Check("x", Status.NOTE, "word " * 60, "advice " * 40),), True)
    assert text.count("word") == 60
    assert text.count("advice") == 40


def test_gpus_without_a_profile_are_told_to_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from weaveopt.fabrics import gpus

    monkeypatch.delenv("WEAVE_MACHINE", raising=False)
    assert doctor._profile().found == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpus, "pair_without_access", lambda: None)
    for name, status in (("NVIDIA L40S", Status.NOTE), ("NVIDIA H200", Status.OK)):
        described = {"gpu": name, "processors": 142, "bytes_per_s": 864 * 10**9}
        monkeypatch.setattr(gpus, "describe", lambda index, described=described: described)
        check = doctor._profile()
        assert check.status is status and ("-m weaveopt calibrate" in check.advice) is (status is Status.NOTE)
        assert (check.found == "h200x4") is (status is Status.OK), "the smallest that holds for two"
    monkeypatch.setattr(gpus, "pair_without_access", lambda: (0, 1))
    assert doctor._profile().found == "h200x2-no-peer", "as the backend chooses"
    monkeypatch.setattr(gpus, "describe", lambda index: {})
    assert doctor._profile().status is Status.NOTE
    monkeypatch.setenv("WEAVE_MACHINE", "here.json")
    assert "here.json" in doctor._profile().found


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("", "reaches every rank of this host; its kernels never ran on hardware: their first calls are checked"),
        (
            "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 is set",
            "no_multicast: torch makes no NVLink multicast mapping of a rank's memory "
            "(rank 0, why TORCH_SYMM_MEM_DISABLE_MULTICAST=1 is set)",
        ),
    ],
)
def test_multicast_is_what_torch_makes_of_it(why: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from weaveopt.fabrics import gpus, traits

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpus, "pair_without_access", lambda: None)
    monkeypatch.setattr(gpus, "describe", lambda index: {"no_multicast": why})
    monkeypatch.setattr(traits, "is_built", lambda part: True)
    found = {check.name: check.found for check in doctor._fabrics()}
    assert found["fabric multimem"] == said
    assert found["fabric peer"] == "reaches every rank of this host"
