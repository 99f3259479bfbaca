"""Profiles in the user's data folder: which ranks use them, and what a broken one does."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.graphs.nonempty import some
from weaveopt import cost_model
from weaveopt.fabrics import user_profiles
from weaveopt.fabrics.user_profiles import CommonProfiles, choose, common, file_name

GPU = "nvidia-toy"
CPU = cost_model.load("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    found = user_profiles.folder()
    assert found == tmp_path / "weaveopt" / "profiles"
    found.mkdir(parents=True)
    return found


def write(folder: Path, ranks: int, has_peer_access: bool = True, device: str = GPU, error: float = 0.06) -> str:
    name = file_name(device, has_peer_access, ranks)
    (folder / name).write_text(cost_model.dumps(replace(CPU, name=Path(name).stem, relative_error=error)))
    return name


def own() -> CommonProfiles:
    return common([GPU], [user_profiles.published()])


def chosen(groups: list[CommonProfiles], ranks: int, has_peer_access: bool = True) -> str | None:
    machine = choose(groups, has_peer_access, ranks).machine
    return None if machine is None else machine.name


def test_the_smallest_profile_of_as_many_ranks_on_such_hardware_is_taken(folder: Path) -> None:
    for ranks in (2, 4, 8):
        write(folder, ranks)
    write(folder, 4, has_peer_access=False)
    write(folder, 4, device="nvidia-other")
    assert [chosen([own()], ranks) for ranks in (1, 2, 3, 4, 8)] == [
        f"{GPU}-x{ranks}" for ranks in (2, 2, 4, 4, 8)
    ]  # fmt: skip
    assert chosen([own()], 16) is None, "a profile says nothing of larger groups"
    assert chosen([own()], 2, has_peer_access=False) == f"{GPU}-no-peer-access-x4"
    assert choose([own()], True, 16).note == ""


def test_nothing_there_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    assert user_profiles.found() == () and choose([own()], True, 2).note == ""
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert user_profiles.folder() == Path(os.path.expanduser("~/.local/share/weaveopt/profiles"))


def test_ranks_of_which_one_has_another_file_use_the_shipped_one_and_say_so(folder: Path) -> None:
    name = write(folder, 2)
    here = user_profiles.published()
    write(folder, 2, error=0.07)
    there = user_profiles.published()
    assert json.loads(here["profiles"]).keys() == json.loads(there["profiles"]).keys()
    for answers in ([here, there], [here, {"profiles": "{}"}], [{"profiles": "{}"}, here]):
        found = choose([common([GPU] * 2, answers)], True, 2)
        assert found.machine is None and name in found.note and "shipped" in found.note
    assert choose([common([GPU, "nvidia-other"], [there, there])], True, 2).machine is None
    assert chosen([common([GPU] * 2, [there, there])], 2) == f"{GPU}-x2"


def test_every_group_of_a_graph_has_to_have_it(folder: Path) -> None:
    write(folder, 2)
    both = common([GPU] * 2, [user_profiles.published()] * 2)
    one = common([GPU] * 2, [user_profiles.published(), {"profiles": "{}"}])
    assert chosen([both], 2) == f"{GPU}-x2" and chosen([both, one], 2) is None
    assert choose([both, one], True, 2).note


def test_a_broken_file_is_one_line_and_no_error(folder: Path) -> None:
    write(folder, 4)
    texts = {"cut": cost_model.dumps(CPU)[:500], "old": '{"schema": 1}', "empty": "", "list": "[]"}
    for word, text in some(texts.items()):
        (folder / f"{GPU}-{word}-x2.json").write_text(text)
    (folder / f"{GPU}-folder-x2.json").mkdir()
    with pytest.warns(UserWarning, match="this profile is not used") as warned:
        found = user_profiles.found()
    assert len(warned) == len(texts) + 1 and all("\n" not in str(each.message) for each in warned)
    broken = [each for each in found if each.problem]
    assert len(broken) == len(texts) + 1 and all(not each.digest for each in broken)
    assert json.loads(user_profiles.published()["profiles"]).keys() == {f"{GPU}-x4.json"}
    assert chosen([own()], 2) == f"{GPU}-x4"


def test_a_file_that_is_replaced_is_read_anew(folder: Path) -> None:
    name = write(folder, 2)
    before = own()
    (folder / name).write_text("{}")
    os.utime(folder / name, ns=(1, 1))
    with pytest.warns(UserWarning, match="not used"):
        assert own().equal == ()
    assert before.equal
    shutil.rmtree(folder)
    assert user_profiles.found() == ()
