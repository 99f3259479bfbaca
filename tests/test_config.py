"""Options: from the call, else the environment, else the default; everything unknown is an error that helps."""

from __future__ import annotations

import pytest

from weaveopt.config import OPTIONS, Config, resolve
from weaveopt.errors import OptionError
from weaveopt.inductor import seams as inductor


def test_the_table_and_the_record_agree() -> None:
    defaults = {option.name: option.default for option in OPTIONS}
    record = {name: value for name, value in vars(Config()).items() if name != "inductor"}
    assert defaults == record
    assert len({option.env for option in OPTIONS}) == len(OPTIONS)


def test_options_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({"timeout_s": 0}, "more than 0 seconds"),
        ({"timeout_s": float("nan")}, "at least 0"),
        ({"max_tokens": -1}, "at least 0"),
        ({"max_tokens": "many"}, "at least 0"),
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
    with pytest.raises(OptionError, match=r"WEAVE_TIMEOUT_S='soon': expected float"):
        resolve()


def test_inductors_options_pass_and_others_do_not() -> None:
    assert resolve({"max_autotune": True}, ("max_autotune",)).inductor == (("max_autotune", True),)
    with pytest.raises(OptionError, match="did you mean 'max_autotune'"):
        resolve({"max_autotun": True}, ("max_autotune",))


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
