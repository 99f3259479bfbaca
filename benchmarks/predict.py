"""Stored measurements held against what the cost model says now; needs no GPU."""

from __future__ import annotations

from benchmarks import record, results_table
from benchmarks.suite import UsageError
from weaveopt import cost_model
from weaveopt.errors import ProfileError


def again(suite: str, machine: str, profile: str) -> int:
    """Predicts the stored cases of `machine` anew: `prediction`, whose file is rewritten, or `overlap`.

    `overlap`: errors of the chosen cut and of all, and the share of the fastest cut's speed that the chosen one has.
    Raises `UsageError`.
    """
    from benchmarks.suites.prediction import summary
    from benchmarks.workloads import overlap_prediction
    from benchmarks.workloads.prediction_model import predict_again

    try:
        model = cost_model.load(profile or machine)
    except ProfileError as error:
        raise UsageError(f"{error}; --profile names another one than --machine") from None
    if suite == "prediction":
        path = record.RESULTS / machine / "prediction.json"
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
        rows = predict_again(model, list(results_table.read(path).rows))
        print(summary(rows))
        print(record.rewrite(path, rows))
        return 0
    sizes = list(overlap_prediction.sizes_of(model, machine))
    if not sizes:
        raise UsageError(f"no row of benchmarks/results/{machine} is of a kernel in the profile")
    for size in sizes:
        off = size.errors[size.chosen]
        print(
            f"{size.suite} {size.tokens} x {size.hidden} x {size.depth}: {size.chosen}, "
            f"{size.measured_us[size.chosen]:.1f} us, predicted {off:+.1%}, {size.reached:.3f} of the best of "
            f"{len(size.measured_us)}"
        )
    print(overlap_prediction.summary(sizes))
    return 0
