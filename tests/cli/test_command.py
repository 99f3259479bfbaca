"""The command line: what is wrong gets one clear line on stderr, exit code 2, and no traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weaveopt
from weaveopt import cost_model, presets, rewrites
from weaveopt.cli import explain, main, model_file, model_source, question


def _config(tmp_path: Path, text: str) -> str:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    return str(file)


def _profile(tmp_path: Path, text: str) -> str:
    file = tmp_path / "machine.json"
    file.write_text(text, encoding="utf-8")
    return str(file)


def _error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    code = main.main(argv)
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("weaveopt: error: ")
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("explane", "invalid choice"),
        ("explain", "MODEL"),
        ("explain llama-3.3-7b --tp 8", "did you mean 'llama-3.3-70b'"),
        ("explain zzz", "known: "),
        (f"explain {'z' * 300}", "known: "),
        (f"explain {'z' * 300}.json", "File name too long"),
        ("explain ./nowhere/config.json", "No such file"),
        ("explain llama-3.3-70b --tp 12 --nodes 2", "2, 4, 8, 16, 32, 64 do"),
        ("explain llama-3.3-70b --tp 3", "64 query, 8 key-value"),
        ("explain qwen3-235b-a22b --tp 12", "2, 4, 8, 16, 32, 64 do"),
        ("explain mixtral-8x22b --ep 3", "8 experts"),
        ("explain llama-3.3-70b --ep 8", "no expert-parallel plan for llama"),
        ("explain gpt-oss-120b --tp 8", "no tensor-parallel plan for gpt_oss; it has an expert-parallel plan"),
        ("explain mixtral-8x22b --tp 2 --ep 4", "same number twice"),
        ("explain llama-3.3-70b --tp -1", "--tp -1"),
        ("explain llama-3.3-70b --tp 0", "--tp 0"),
        ("explain llama-3.3-70b --tp eight", "invalid int value"),
        ("explain llama-3.3-70b --tp 8 --batch 0", "--batch 0: expected at least 1"),
        ("explain llama-3.3-70b --tp 8 --seq -5", "--seq -5: expected at least 1"),
        ("explain llama-3.3-70b --tp 8 --tokens 0", "--tokens 0: expected at least 1"),
        ("explain llama-3.3-70b --tp 8 --tokens 64 --seq 64", "one or the other"),
        ("explain llama-3.3-70b --tp 8 --layers 81", "has 80"),
        ("explain llama-3.3-70b --tp 8 --layers most", "expected a number, or all"),
        ("explain llama-3.3-70b --tp 8 --full --why x", "cannot go with --why SITE"),
        ("explain llama-3.3-70b --tp 8 --full --format json", "cannot go with --format json (--layers all: every"),
        ("explain llama-3.3-70b --tp 8 --phase decode --all-logits", "--all-logits is of prefill"),
        ("explain llama-3.3-70b --tp 8 --nodes 3", "evenly"),
        ("explain llama-3.3-70b --tp 8 --nodes 1 --machine h200x4", "raise --nodes"),
        ("explain llama-3.3-70b --tp 8 --machine h1000x8", "h100x8"),
        (f"explain llama-3.3-70b --machine {'z' * 300}", "neither a shipped profile nor a JSON file"),
        ("explain llama-3.3-70b --machine ~nobody/x.json", "No such file"),
        ("explain llama-3.3-70b --tp 8 --disable all_reduce_norm", "did you mean 'all_reduce_rms_norm'"),
        ("explain llama-3.3-70b --tp 8 --why x --format json", "--format json"),
        ("explain llama-3.3-70b --tp 8 --output /no/such/place/report.json --format json", "no directory"),
        ("explain llama-3.3-70b --tp 8 --output /proc", "--output /proc: is a directory"),
        ("explain llama-3.3-70b --tp 8 --why x --output x.svg", "--output x.svg"),
        ("explain llama-3.3-70b --tp 8 --format png", "give --output FILE.png"),
        ("explain llama-3.3-70b --tp 8 --format png --output x.svg", "which of the two is meant"),
        ("explain llama-3.3-70b --tp 8 --format svg --output /no/such/place/x.svg", "no directory"),
        ("explain --tp 8", "give a MODEL"),
        ("explain --compare a.json", "expected 2 arguments"),
        ("explain llama-3.3-70b --compare a.json b.json", "cannot go with MODEL"),
        ("explain --compare a.json b.json --tp 8 --phase decode", "cannot go with --tp, --phase"),
        ("explain --compare a.json b.json --full --disable all_reduce_rms_norm", "cannot go with --full, --disable"),
        ("explain --compare a.json b.json --why x", "cannot go with --why"),
        ("explain --compare a.json b.json --format json", "cannot go with --format json"),
        ("explain --compare a.json b.json --output x.png", "cannot go with --output x.png"),
        ("explain --compare a.json b.json --output /no/such/place/x.txt", "no directory"),
        ("explain llama-3.3-70b --tp 8 --dtype int8", "invalid choice"),
        ("explain llama-3.3-70b --tp 8 --phase both", "invalid choice"),
        ("doctor --format xml", "invalid choice"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in _error(words.split(), capsys)


@pytest.mark.parametrize(
    "words",
    [
        *(
            ["explain", "llama-3.3-70b", "--tp", "8", option]
            for option in ("--why", "--machine", "--disable", "--skew")
        ),
        ["calibrate", "--name"],
        ["tuned", "--wipe", "--cache"],
    ],
    ids=lambda words: words[-1],
)
def test_an_empty_argument_is_not_taken_as_none(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """So comes a shell's variable that is not set."""
    for empty in ("", " "):
        assert f"{words[-1]}: empty" in _error([*words, empty], capsys)
    assert "MODEL: empty" in _error(["explain", ""], capsys)


@pytest.mark.parametrize("options", [[], ["--wipe"]])
def test_a_file_is_no_folder_of_times(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "times").write_text("mine")
    named = str(tmp_path / "times")
    assert f"--cache {named}: is a file" in _error(["tuned", "--cache", named, *options], capsys)
    monkeypatch.setenv("WEAVE_TUNE_CACHE", named)
    assert f"WEAVE_TUNE_CACHE {named}: is a file" in _error(["tuned", *options], capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no 'model_type'"),
        ('{"hidden_size": 8}', "no 'model_type'"),
        ('{"model_type": "lama"}', "did you mean 'llama'"),
        ('{"model_type": "gpt2"}', "no tensor-parallel plan for gpt2"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "not a valid llama configuration"),
        ('{"model_type": "t5"}', "t5"),
        ('{"model_type": "bert"}', "no tensor-parallel plan for bert"),
        ('{"model_type": 3}', "no 'model_type'"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}', "its own code (auto_map)"),
        ("[" * 100_000, "not JSON that can be read: RecursionError"),
        ('{"model_type": ' + "9" * 5000 + "}", "not JSON that can be read: ValueError"),
        ('{"model_type": "llama", "text_config": 3, "num_hidden_layers": 2}', "no num_hidden_layers"),
    ],
)
def test_configurations_that_cannot_be_used(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in _error(["explain", _config(tmp_path, text), "--tp", "2"], capsys)


TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pad_token_id": 500}, "transformers cannot build a llama of this configuration: AssertionError: Padding_idx"),
        ({"hidden_act": "swoosh"}, "transformers cannot build a llama of this configuration: KeyError: 'swoosh'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "KeyError: 'spiral'"),
        ({"attn_implementation": "magic"}, "cannot build a llama"),
        ({"hidden_size": 10**30}, "cannot build a llama"),
        ({"hidden_size": -64}, "hidden_size -64; expected at least 1"),
        ({"hidden_size": 0}, "hidden_size 0; expected at least 1"),
        ({"intermediate_size": -1}, "intermediate_size -1; expected at least 1"),
        ({"vocab_size": 0}, "vocab_size 0; expected at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0; expected at least 1"),
        ({"head_dim": -16}, "head_dim -16; expected at least 1"),
        ({"num_hidden_layers": -2}, "no num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000; expected at most 10000"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers 1000000000; expected at most 10000"),
        ({"num_attention_heads": 0}, "num_attention_heads 0; expected at least 1"),
        ({"num_attention_heads": 3}, "3 query, 2 key-value"),
        ({"num_attention_heads": 6, "hidden_size": 64}, "not a multiple of the number of attention heads"),
        ({"num_attention_heads": None}, "not a valid llama configuration"),
        ({"num_key_value_heads": 3}, "4 query, 3 key-value"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "Missing required keys"),
        ({"torch_dtype": "float99"}, "not a valid llama configuration"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "must be equal to the number of `layer_types`"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 9}, "k not in range for dimension"),
    ],
)
def test_configurations_that_transformers_cannot_build(
    fields: dict[str, object], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, and nothing else: what torch logs of an error goes around `sys.stderr`."""
    config = _config(tmp_path, json.dumps({**TINY, **fields}))
    assert message in _error(["explain", config, "--tp", "2", "--tokens", "8", "--machine", "cpu"], capfd)


def test_a_directory_without_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "config.json cannot be read: No such file" in _error(["explain", str(tmp_path), "--tp", "2"], capsys)


def test_a_pipe_as_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody writes into it."""
    os.mkfifo(tmp_path / "config.json")
    assert "cannot be read: not a regular file" in _error(["explain", str(tmp_path), "--tp", "2"], capsys)


def test_a_binary_file_as_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"\xff\xfe\x00\x80")
    assert "not UTF-8 text" in _error(["explain", str(file), "--tp", "2"], capsys)


def test_a_hub_id_without_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def unreachable(*_: object, **__: object) -> object:
        raise OSError("We couldn't connect to the hub\nCheck your connection")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    error = _error(["explain", "meta-llama/Llama-3.3-70B", "--tp", "8"], capsys)
    assert "cannot get the configuration of 'meta-llama/Llama-3.3-70B'" in error
    assert "did you mean 'llama-3.3-70b'" in error


@pytest.mark.parametrize("spoil", ["missing", "negative", "unreadable"])
def test_profiles_that_cannot_be_used(spoil: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(cost_model.dumps(cost_model.load("cpu")))
    if spoil == "missing":
        del document["ranks_per_host"]
    document["relative_error"] = -1 if spoil == "negative" else document["relative_error"]
    text = "{" if spoil == "unreadable" else json.dumps(document)
    error = _error(["explain", "llama-3.3-70b", "--tp", "8", "--machine", _profile(tmp_path, text)], capsys)
    assert {"missing": "ranks_per_host", "negative": "relative_error", "unreadable": "machine.json"}[spoil] in error


def test_help_is_quick_and_loads_no_torch() -> None:
    code = "import sys; from weaveopt.cli.main import main; main(['explain', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("False")
    assert all(name in done.stdout for name in ("llama-3.3-70b", "--why", "--machine", "--compare", "svg"))


NAMES_AND_NUMBERS = (
    "no-such-model",
    "./nowhere/config.json",
    "llama-3.3-70b --machine nosuch",
    "llama-3.3-70b --disable nosuch",
    "llama-3.3-70b --skew much",
    "llama-3.3-70b --tp 0",
    "llama-3.3-70b --tp 3",
    "llama-3.3-70b --tp 8 --nodes 3",
    "llama-3.3-70b --tp 8 --machine h200x4 --nodes 1",
    "llama-3.3-70b --tp 2 --ep 4",
    "llama-3.3-70b --layers 81",
    "llama-3.3-70b --ep 8",
    "mixtral-8x22b --ep 3",
    "qwen3-235b-a22b --tp 12",
    "gpt-oss-120b --tp 8",
    "--compare a.json b.json",
    "calibrate --base nosuch",
    "calibrate --name \x1b[31m",
    f"calibrate --name {'x' * 256}",
)
"""Wrong arguments of `explain`, unless another command is named."""


def test_names_and_numbers_are_refused_before_torch_is_imported() -> None:
    """Half a second is what people take for at once; importing torch and transformers alone takes ten times as much."""
    code = f"""if True:
        import sys, time
        from weaveopt.cli.main import main
        for words in {NAMES_AND_NUMBERS}:
            start = time.process_time()
            assert main([*([] if words.startswith("calibrate") else ["explain"]), *words.split()]) == 2, words
            loaded = {{"torch", "transformers"}} & sys.modules.keys()
            assert not loaded and time.process_time() - start < 0.5, (words, loaded, time.process_time() - start)
        print(time.process_time())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(NAMES_AND_NUMBERS)
    assert float(done.stdout) < 2


@pytest.mark.parametrize("name", presets.names())
def test_plans_are_known_without_transformers(name: str) -> None:
    """The sketch that refuses a number early says what the configuration that transformers builds says."""
    sketch, built = model_source.sketch(name), model_source.load(name).config
    assert sketch is not None and not sketch.built
    for plan in model_file.PLANS:
        assert getattr(sketch.config, plan) == getattr(built, plan)
    for field, value in vars(sketch.config).items():
        assert getattr(built, field) == value, field


def test_rules_are_known_without_torch() -> None:
    assert set(explain.rule_names()) == set(rewrites.names())


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("gpt-oss-120b", (0, 8)),
        ("gpt-oss-120b --nodes 2", (0, 16)),
        ("gpt-oss-120b --machine h200x4", (0, 4)),
        ("mixtral-8x22b", (8, 0)),
        ("qwen3-235b-a22b", (4, 0)),
        ("gpt-oss-120b --ep 2", (0, 2)),
    ],
)
def test_a_model_without_options_gets_the_plan_that_it_has(words: str, ranks: tuple[int, int]) -> None:
    args = main.parser().parse_args(["explain", *words.split()])
    del args.command
    asked = question.question(args)
    machine = cost_model.load(asked.machine or question.DEFAULT_MACHINE)
    for source in (model_source.sketch(asked.model or ""), model_source.load(asked.model or "")):
        assert source is not None
        request = explain.request_of(asked, source, machine)
        assert (request.tp, request.ep) == ranks
        model_source.check(source, request)


def test_a_package_that_is_too_old_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_old(_: object) -> int:
        raise ImportError("cannot import name 'DistributedConfig' from 'transformers'\n(/somewhere)")

    monkeypatch.setattr(explain, "run", too_old)
    assert "'transformers' (/somewhere) (see weaveopt doctor)" in _error(["explain", "llama-3.3-70b"], capsys)


def test_the_command_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and all(command in shown.out for command in ("explain", "calibrate", "doctor", "--version"))


def test_the_module_runs_as_the_command_and_says_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "weaveopt", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"weaveopt {weaveopt.__version__}\n" and done.stderr == ""
    wrong = subprocess.run([sys.executable, "-m", "weaveopt", "explane"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert wrong.stderr.startswith("weaveopt: error: ")


def test_interrupt_and_closed_pipe_are_quiet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, "run", interrupted)
    assert main.main(["explain", "llama-3.3-70b"]) == 130
    assert capfd.readouterr().err == ""
    line = f"{sys.executable} -m weaveopt.cli.main doctor | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""


def test_output_that_cannot_be_written_is_one_line_or_quiet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A full disk, a closed standard output, and one whose encoding lacks a sign of the report."""
    line = f"{sys.executable} -m weaveopt.cli.main explain --help >&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.setattr(explain, "run", lambda _: print("1 × 2") or 0)
    with open("/dev/full", "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main.main(["explain", "llama-3.3-70b"]) == 2
    assert capfd.readouterr().err == "weaveopt: error: No space left on device\n"
    sink = io.BytesIO()
    with io.TextIOWrapper(sink, encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main.main(["explain", "llama-3.3-70b"]) == 0
        assert sink.getvalue() == b"1 ? 2\n"


def test_every_preset_is_named_in_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert main.main(["explain", "--help"]) == 0
    assert all(name in "".join(out.getvalue().split()) for name in presets.names())


def test_a_locale_that_torch_cannot_be_read_in_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0`: Inductor's templates are not ASCII."""
    monkeypatch.setattr("weaveopt.cli.main.doctor.run", lambda form: b"\xe2".decode("ascii"))
    assert "set PYTHONUTF8=1" in _error(["doctor"], capsys)
