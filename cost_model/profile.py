"""Profiles: JSON files with a machine's constants, checked and turned into records. Nothing is executed."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from weaveopt.cost_model import document as doc
from weaveopt.cost_model.machine import (
    FORMS,
    Curve,
    FabricCosts,
    Link,
    Machine,
    MemoryCosts,
    Origin,
    Point,
    ProductCosts,
    Rate,
    Tile,
)
from weaveopt.cost_model.validate import checked
from weaveopt.decision import Algorithm, Fabric, Form
from weaveopt.errors import ProfileError, closest

_PROFILES = Path(__file__).parent / "profiles"
SCHEMA = 1


@cache
def names() -> tuple[str, ...]:
    """The shipped profiles, sorted."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.json")))


def load(name_or_path: str) -> Machine:
    """The machine of a shipped profile's name, or of a JSON file.

    Raises `ProfileError`, one line: file, field, what was found and what is expected.
    """
    text = os.fspath(name_or_path)
    if text in names():
        return _shipped(text)
    path = Path(text).expanduser()
    if path.suffix != ".json" and os.sep not in text and not path.is_file():
        raise ProfileError(f"machine {text!r}: neither a shipped profile nor a JSON file; {closest(text, names())}")
    return _machine(_read(path, shipped=False))


@cache
def _shipped(name: str) -> Machine:
    return _machine(_read(_PROFILES / f"{name}.json", shipped=True))


def dumps(machine: Machine) -> str:
    """The profile of `machine` as JSON text: `load` gives the same machine back."""
    text = json.dumps(_document(machine), indent=2)
    # Innermost objects (points, tiles, links, origins) go on one line each.
    return re.sub(r"\{[^{}\[\]]*\}", lambda leaf: " ".join(leaf.group().split()), text) + "\n"


def _read(path: Path, shipped: bool) -> doc.ProfileDocument:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ProfileError(f"profile {path}: cannot be read: not UTF-8 text") from None
    except OSError as error:
        raise ProfileError(f"profile {path}: cannot be read: {error.strerror}") from None
    return checked(str(path), text, shipped)


def _points(raw: list[doc.PointDocument]) -> tuple[Point, ...]:
    return tuple(Point(each["bytes"], float(each["us"])) for each in raw)


def _link(raw: doc.LinkDocument) -> Link:
    return Link(raw["origin"], float(raw["latency_us"]), float(raw["bytes_per_s"]))


def _curve(raw: doc.CurveDocument) -> Curve:
    return Curve(raw["origin"], Algorithm(raw["algorithm"]), raw["world"], _points(raw["points"]))


def _default_form(fabric: Fabric, algorithm: Algorithm) -> Form:
    """The form of a curve that does not tell: profiles were written before there were several."""
    if fabric is Fabric.PEER:
        return Form.MAIL if algorithm is Algorithm.ONE_SHOT else Form.BULK
    return next(iter(FORMS[fabric]), Form.SEGMENT)


def _fused_curve(fabric: Fabric, raw: doc.FusedCurveDocument) -> Curve:
    curve = _curve(raw)
    form = Form(raw["form"]) if "form" in raw else _default_form(fabric, curve.algorithm)
    return replace(curve, form=form, ctas=raw.get("ctas", 0), hidden=raw.get("hidden", 0))


def _fabric(name: str, raw: doc.FabricDocument) -> FabricCosts:
    fabric = Fabric(name)
    return FabricCosts(
        fabric=fabric,
        link=_link(raw["link"]),
        all_reduce=tuple(map(_curve, raw.get("all_reduce", []))),
        all_reduce_norm=tuple(_fused_curve(fabric, each) for each in raw.get("all_reduce_norm", [])),
        forms=tuple(map(Form, raw.get("forms", []))),
    )


def _products(dtype: str, raw: doc.ProductsDocument) -> ProductCosts:
    return ProductCosts(
        dtype=dtype,
        origin=raw["origin"],
        launch_us=float(raw["launch_us"]),
        bytes_per_s=float(raw["bytes_per_s"]),
        units=raw.get("units", 1),
        tiles=tuple(Tile(each["m"], each["n"], float(each["flops_per_s"])) for each in raw.get("tiles", [])),
        rates=tuple(Rate(each["m"], float(each["flops_per_s"])) for each in raw.get("rates", [])),
    )


def _machine(raw: doc.ProfileDocument) -> Machine:
    # Sorted, so that the order of keys in the file changes nothing.
    memory = raw["memory"]
    return Machine(
        name=raw["name"],
        device=raw["device"],
        ranks_per_host=raw["ranks_per_host"],
        relative_error=float(raw["relative_error"]),
        origins=tuple(
            (name, Origin(each["kind"], each["date"], each["host"], each["note"]))
            for name, each in sorted(raw["origins"].items())
        ),
        memory=MemoryCosts(
            origin=memory["origin"],
            floor_us=float(memory["floor_us"]),
            bytes_per_s=float(memory["bytes_per_s"]),
            points=_points(memory.get("points", [])),
        ),
        products=tuple(_products(dtype, each) for dtype, each in sorted(raw["products"].items())),
        inter_host=_link(raw["inter_host"]),
        fabric_costs=tuple(_fabric(name, each) for name, each in sorted(raw["fabrics"].items())),
    )


def _point_documents(points: tuple[Point, ...]) -> list[doc.PointDocument]:
    return [{"bytes": point.bytes, "us": point.us} for point in points]


def _link_document(link: Link) -> doc.LinkDocument:
    return {"origin": link.origin, "latency_us": link.latency_us, "bytes_per_s": link.bytes_per_s}


def _curve_document(curve: Curve) -> doc.CurveDocument:
    points = _point_documents(curve.points)
    return {"origin": curve.origin, "algorithm": curve.algorithm.value, "world": curve.world, "points": points}


def _fused_curve_document(curve: Curve) -> doc.FusedCurveDocument:
    plain = _curve_document(curve)
    raw: doc.FusedCurveDocument = {
        "origin": plain["origin"],
        "algorithm": plain["algorithm"],
        "form": curve.form.value,
        "world": plain["world"],
        "points": plain["points"],
    }
    if curve.ctas:
        raw["ctas"] = curve.ctas
    if curve.hidden:
        raw["hidden"] = curve.hidden
    return raw


def _fabric_document(costs: FabricCosts) -> doc.FabricDocument:
    raw: doc.FabricDocument = {
        "link": _link_document(costs.link),
        "all_reduce": list(map(_curve_document, costs.all_reduce)),
        "all_reduce_norm": list(map(_fused_curve_document, costs.all_reduce_norm)),
    }
    if costs.forms:
        raw["forms"] = [form.value for form in costs.forms]
    return raw


def _products_document(costs: ProductCosts) -> doc.ProductsDocument:
    raw: doc.ProductsDocument = {
        "origin": costs.origin,
        "launch_us": costs.launch_us,
        "bytes_per_s": costs.bytes_per_s,
    }
    if costs.tiles:
        raw["units"] = costs.units
        raw["tiles"] = [{"m": each.m, "n": each.n, "flops_per_s": each.flops_per_s} for each in costs.tiles]
    else:
        raw["rates"] = [{"m": each.m, "flops_per_s": each.flops_per_s} for each in costs.rates]
    return raw


def _memory_document(memory: MemoryCosts) -> doc.MemoryDocument:
    raw: doc.MemoryDocument = {
        "origin": memory.origin,
        "floor_us": memory.floor_us,
        "bytes_per_s": memory.bytes_per_s,
    }
    if memory.points:
        raw["points"] = _point_documents(memory.points)
    return raw


def _document(machine: Machine) -> doc.ProfileDocument:
    return {
        "schema": SCHEMA,
        "name": machine.name,
        "device": machine.device,
        "ranks_per_host": machine.ranks_per_host,
        "relative_error": machine.relative_error,
        "origins": {
            name: {"kind": each.kind, "date": each.date, "host": each.host, "note": each.note}
            for name, each in machine.origins
        },
        "memory": _memory_document(machine.memory),
        "products": {each.dtype: _products_document(each) for each in machine.products},
        "inter_host": _link_document(machine.inter_host),
        "fabrics": {each.fabric.value: _fabric_document(each) for each in machine.fabric_costs},
    }
