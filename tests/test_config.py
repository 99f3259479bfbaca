"""Options: from the call, else the environment, else the default; everything unknown is an error that helps."""

from __future__ import annotations

import re
import threading
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest
import torch.compiler.config
from torch._inductor import config as inductor_config

from tests.graphs.preview import fake_group
from weaveopt.config import OPTIONS, OWN_OF_INDUCTOR, Config, Option, resolve
from weaveopt.errors import ArenaError, OptionError
from weaveopt.fabrics import addresses, shm
from weaveopt.inductor import seams as inductor


def test_the_table_and_the_record_agree() -> None:
    defaults = {option.name: option.default for option in OPTIONS}
    record = {name: value for name, value in vars(Config()).items() if name != "inductor"}
    assert defaults == record
    assert len({option.env for option in OPTIONS}) == len(OPTIONS)


def test_names_of_files_are_each_ranks_own() -> None:
    """Every option that names a file or folder, and what of Inductor's changes no code; nothing else may differ."""
    files = {
        option.name for option in OPTIONS if option.default is None and option.name != "skew" and not option.is_number
    }
    assert files == {"machine", "tune_cache"} == {option.name for option in OPTIONS if option.own}
    agreed = Config().agreed()
    assert agreed.keys() == {field.name for field in fields(Config)} - files
    options = [("trace.debug_dir", "/here"), ("compile_threads", 4), ("fx_graph_cache", False), ("max_autotune", True)]
    own, common = Config(inductor=tuple(options)), Config(inductor=(options[-1],))
    assert own.agreed() == common.agreed() != agreed


def test_files_of_inductor_are_each_ranks_own() -> None:
    """Every option of Inductor that names a file or folder, but of other devices and of code made ahead of time."""
    known = set(inductor.known_options())
    assert all(any(name.startswith(prefix) for name in known) for prefix in OWN_OF_INDUCTOR)
    files = {name for name in known if re.search(r"(_dir|_?path|bandwidth_output|cxx)$", name)}
    files = {name for name in files if not name.startswith(("aot_inductor", "rocm.", "xpu."))}
    # What decides the order of collectives has to be said alike.
    files -= {"aten_distributed_optimizations.profile_guided_estimations_profile_path"}
    assert {"global_cache_dir", "cpp.cxx", "trace.debug_dir"} <= files
    common = Config().agreed()
    assert {name for name in files if Config(inductor=((name, "/here"),)).agreed() != common} == set()


def test_options_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEAVE_TUNE_BUDGET_S", raising=False)
    monkeypatch.setenv("WEAVE_STRICT", "1")
    monkeypatch.setenv("WEAVE_MAX_TOKENS", "77")
    monkeypatch.setenv("WEAVE_DISABLE", "a, b")
    assert resolve() == Config(strict=True, max_tokens=77, disable=("a", "b"))
    assert resolve({"max_tokens": 5, "strict": False, "disable": ["c"]}) == Config(max_tokens=5, disable=("c",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strikt": True}, "did you mean 'strict'"),
        ({"strict": 1}, "expected True or False"),
        ({"max_tokens": -1}, "got -1, expected a whole number from 1 to 2147483647"),
        ({"max_tokens": "many"}, "got 'many', expected a whole number"),
        ({"disable": [1]}, "list of names"),
        ({"disable": ["all_reduce_rms"]}, "did you mean 'all_reduce_rms_norm'"),
        ({"machine": 3}, "a name or a file"),
        ({"skew": "0.5"}, "ROWS:EXPERTS, such as 0.5:0.125"),
        ({"skew": "0.1:0.5"}, "smaller share of experts"),
        ({"skew": "nan:nan"}, "smaller share of experts"),
    ],
)
def test_a_wrong_option_is_one_clear_line(options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        resolve(options, rules=("all_reduce_rms_norm",))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_wrong_variable_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEAVE_TIMEOUT_S", "soon")
    with pytest.raises(OptionError, match=r"WEAVE_TIMEOUT_S='soon', expected seconds from 0.001 to 1000000"):
        resolve()
    monkeypatch.setenv("WEAVE_TIMEOUT_S", "5")
    monkeypatch.setenv("WEAVE_SKEW", "0.1:0.5")
    with pytest.raises(OptionError, match=r"WEAVE_SKEW='0.1:0.5', .*smaller share of experts"):
        resolve()


NUMBERS = tuple(option for option in OPTIONS if type(option.default) in (int, float))
TIMES = tuple(option for option in NUMBERS if option.name.endswith("_s"))
NEVER: tuple[object, ...] = (
    *(float("nan"), float("inf"), float("-inf"), -1, -0.5, 10**400, 10**5000, -(10**5000), 1e30),
    *(True, False, None, "120", "", b"1", [1], 1 + 0j),
)
"""Values that no numeric option accepts."""


@pytest.mark.parametrize("option", NUMBERS, ids=[option.name for option in NUMBERS])
def test_no_odd_number_gets_past_the_options(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [*NEVER, *((1e10, 10**10, 1e7) if option in TIMES else (2.5, 1 << 63))]
    if "timeout" in option.name:
        odd += [0, 1e-12]
    for value in odd:
        with pytest.raises(OptionError, match=f"^option '{option.name}': got .*, expected .* from ") as caught:
            resolve({option.name: value})  # type: ignore[dict-item]
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 160
    for text in ("inf", "nan", "1e10" if option in TIMES else "2.5", "-1", "9" * 5000, "1_0.0.0", "0x10"):
        monkeypatch.setenv(option.env, text)
        with pytest.raises(OptionError, match=f"^{option.env}='.*, expected .* from ") as caught:
            resolve()
        assert len(str(caught.value)) < 160


@pytest.mark.parametrize("option", TIMES, ids=[option.name for option in TIMES])
def test_every_time_that_is_taken_fits_what_waits(option: Option) -> None:
    """Timers of threads and of the system, milliseconds of 31 bits, nanoseconds of 63."""
    for seconds in (option.most, option.least):
        assert getattr(resolve({option.name: seconds}), option.name) == seconds
        assert seconds <= threading.TIMEOUT_MAX and seconds * 1e3 < 1 << 31 and seconds * 1e9 < 1 << 63
        assert timedelta(seconds=seconds).total_seconds() == seconds
    if option.least:
        assert option.least * 1e3 >= 1, "a wait of no whole millisecond would end at once"


def test_numbers_are_taken_in_any_notation(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve({"max_tokens": 1e3, "arena_bytes": 1 << 48, "timeout_s": 5, "verify_budget_s": 0})
    assert (found.max_tokens, found.arena_bytes, found.timeout_s, found.verify_budget_s) == (1000, 1 << 48, 5.0, 0.0)
    assert (type(found.max_tokens), type(found.timeout_s)) == (int, float)
    monkeypatch.setenv("WEAVE_MAX_TOKENS", " 1e3 ")
    monkeypatch.setenv("WEAVE_ARENA_BYTES", "1_000_000")
    assert (resolve().max_tokens, resolve().arena_bytes) == (1000, 1_000_000)


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_variable_is_not_set(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.setenv(option.env, empty)
    assert resolve() == Config()


def test_a_machine_may_be_a_path() -> None:
    assert resolve({"machine": Path("own.json")}).machine == "own.json"  # type: ignore[dict-item]
    with pytest.raises(OptionError, match="got '', expected a name or a file"):
        resolve({"machine": ""})


@pytest.mark.parametrize("word", ["", " ", "many", "0", "-3"])
def test_ranks_of_a_host_are_all_where_the_launcher_does_not_tell(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", word)
    with fake_group(6):
        assert shm.num_local_processes() == 6
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert shm.num_local_processes() == 2


def test_the_store_leads_to_the_others_where_names_of_interfaces_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEAVE_ADDRESS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert addresses.own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(ArenaError, match="set WEAVE_ADDRESS"):
        addresses.own_address()


ROOT = Path(__file__).parents[1]
READ_AS_THEY_ARE = {
    "weaveopt/config.py": "variable() itself",
    "weaveopt/cli/preview.py": "puts back what it found",
    "weaveopt/fabrics/symmetric.py": "puts back what it found",
    "weaveopt/reporting/terminal.py": "takes empty ones as the conventions of terminals have it",
    "weaveopt/fabrics/topology.py": "an empty name of a host is none",
    "weaveopt/fabrics/peer.py": "CUDA_VISIBLE_DEVICES: empty and not set are two things to CUDA",
}


def test_no_variable_is_read_past_the_rule_for_empty_ones() -> None:
    """`os.environ[...]` and `.get` in the package, but for where an empty variable is not one that is not set."""
    reading = re.compile(r"environ(\.get\(|\[[^]]+\](?! *=[^=]))|getenv\(| in os\.environ\b")
    files = [path for room in ("weaveopt", "rewrites", "cost_model") for path in (ROOT / room).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT))
        for path in files
        if any(reading.search(line) and "del os.environ" not in line for line in path.read_text().splitlines())
    }
    assert found <= READ_AS_THEY_ARE.keys(), found - READ_AS_THEY_ARE.keys()


def test_inductors_options_pass_and_others_do_not() -> None:
    for name in ("max_autotune", "max-autotune"):
        assert resolve({name: True}, ("max_autotune",)).inductor == (("max_autotune", True),)
    with pytest.raises(OptionError, match="did you mean 'max_autotune'"):
        resolve({"max_autotun": True}, ("max_autotune",))


def test_a_name_for_a_setting_elsewhere_passes_and_is_applied() -> None:
    """Torch 2.15 takes it in `torch.compile(options=...)`, and `list_options()` leaves it out."""
    asked = resolve({"force_disable_caches": True}, inductor.known_options())
    with inductor_config.patch(inductor.patches_for(None, asked)):  # type: ignore[attr-defined]
        assert torch.compiler.config.force_disable_caches  # type: ignore[attr-defined]


def test_ranks_do_not_decide_by_the_clock_whether_products_are_padded() -> None:
    known = inductor.known_options()
    assert inductor.patches_for(None, resolve({}, known))["shape_padding"] is False
    asked = resolve({"shape_padding": True}, known)
    assert inductor.patches_for("reduce-overhead", asked)["shape_padding"] is True


def test_a_mode_that_inductor_lacks_is_a_clear_error() -> None:
    with pytest.raises(OptionError, match=r"unknown mode 'fast'.*reduce-overhead"):
        inductor.patches_for("fast", resolve())


def test_an_unknown_option_does_not_list_those_of_inductor() -> None:
    with pytest.raises(OptionError, match=r"known: strict, .*list_options") as caught:
        resolve({"zzz": 1}, inductor.known_options())
    assert len(str(caught.value)) < 400
