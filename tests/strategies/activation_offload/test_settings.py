"""Settings: defaults, every refusal, and what the report says."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from lightning_longctx import ConfigurationError, LongContextFSDPStrategy
from lightning_longctx.strategies.activation_offload import ActivationOffload, as_offload, offload_activations
from lightning_longctx.strategies.activation_offload.report import OffloadCounters, describe, refuse_nothing_moved
from lightning_longctx.strategies.activation_offload.setup import backend_for
from lightning_longctx.strategies.activation_offload.virtual import VirtualBackend
from lightning_longctx.strategies.matching import match_modules
from lightning_longctx.units import GIB, MIB
from tests.strategies.activation_offload.helpers import Model, batch, running, settings


@pytest.mark.parametrize("field", ["device_limit_gib", "host_limit_gib", "min_tensor_mib", "prefetch_mib"])
@pytest.mark.parametrize("value", [-1, -1e-9, math.inf, -math.inf, math.nan, 1e12, "4", True, [1]])
def test_numbers_are_checked_and_never_reinterpreted(field, value):
    """A negative limit meant: offload everything, silently."""
    with pytest.raises(ConfigurationError, match=f"strategy.activation_offload.{field}"):
        ActivationOffload(**{field: value})


@pytest.mark.parametrize("value", [-1, 1.5, True, 2**20, "1"])
def test_blocks_to_keep_are_a_whole_number(value):
    with pytest.raises(ConfigurationError, match="keep_last_blocks"):
        ActivationOffload(keep_last_blocks=value)


@pytest.mark.parametrize(
    "value",
    [
        ["sync", "async"],
        {"mode": ["sync", "async"]},
        {"sync": {}, "async": {}},
        {"mode": "sync", "async": {"prefetch_mib": 1}},
    ],
    ids=str,
)
def test_both_modes_at_once_are_refused(value):
    with pytest.raises(ConfigurationError, match="takes one mode"):
        as_offload(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("asynch", "mode"),
        ({"level": "everything"}, "level"),
        ({"mode": "sync", "prefetch_mib": 3}, "acts in mode async only"),
        ({"host_limit": 3}, "host_limit_gib"),
        ({"host_limit_gib": 0}, "must be positive"),
        ({"modules": "LlamaDecoderLayer"}, "must be a list"),
        ({"modules": []}, "must be a list"),
        ({"modules": [3]}, "must be a list"),
        ({"strict": "no"}, "strict"),
        (3, "activation_offload"),
    ],
    ids=str,
)
def test_refusals(value, words):
    with pytest.raises(ConfigurationError, match=words):
        as_offload(value)


def test_the_strategy_takes_modes_mappings_and_settings():
    assert LongContextFSDPStrategy().activation_offload.mode == "none"
    assert LongContextFSDPStrategy(activation_offload="async").activation_offload == ActivationOffload()
    mapping = {"mode": "sync", "host_limit_gib": 3}
    assert LongContextFSDPStrategy(activation_offload=mapping).activation_offload == ActivationOffload(**mapping)


@pytest.mark.parametrize(
    ("checkpointing", "level", "fine"),
    [
        ("full", "all", False),
        ("selective", "all", False),
        ("none", "all", True),
        ("every_n", "all", True),
        ("full", "policy", False),
        ("none", "policy", False),
        ("selective", "policy", True),
        ("full", "boundary", True),
    ],
)
def test_a_level_that_cannot_act_is_refused(checkpointing, level, fine):
    options = {"activation_checkpointing": checkpointing, "activation_offload": {"mode": "sync", "level": level}}
    if fine:
        LongContextFSDPStrategy(**options)
    else:
        with pytest.raises(ConfigurationError, match=r"activation_offload\.level"):
            LongContextFSDPStrategy(**options)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["Block"], ["layers.0", "layers.1", "layers.2", "layers.3"]),
        (["layers.*"], ["layers.0", "layers.1", "layers.2", "layers.3"]),
        (["layers.[13]", "first"], []),  # no star and no dot: a class
        (["layers.[13]"], ["layers.1", "layers.3"]),
        (["*.qkv"], [f"layers.{number}.qkv" for number in range(4)]),
        (["layers.2", "layers.2.qkv"], ["layers.2"]),
        (["Linear"], ["first", *(f"layers.{n}.{part}" for n in range(4) for part in ("qkv", "down"))]),
    ],
    ids=str,
)
def test_modules_by_name_or_by_pattern_of_a_path(names, found):
    model = Model()
    paths = {child: path for path, child in model.named_modules()}
    if not found:
        with pytest.raises(ConfigurationError, match="must name submodules, but got 'first'"):
            match_modules(model, names, "modules")
    else:
        assert [paths[child] for child in match_modules(model, names, "modules")] == found


def test_modules_without_a_match_are_an_error():
    offload = running("sync", modules=["LlamaDecoderLayer"])
    with pytest.raises(ConfigurationError, match=r"activation_offload\.modules.*LlamaDecoderLayer"):
        offload.attach(Model(), [])
    with pytest.raises(ConfigurationError, match="needs repeated blocks"):
        running("sync").attach(torch.nn.Linear(2, 2), [])


def test_only_named_modules_move():
    model, offload = Model(), running("sync", level="all", modules=["layers.[02]"])
    offload.attach(model, model.layers)
    model(batch()).sum().backward()
    assert offload.counters.calls == 2


def test_devices_without_a_backend_are_refused():
    assert isinstance(backend_for(torch.device("cpu")), VirtualBackend)
    with pytest.raises(ConfigurationError, match="works on cuda and cpu"):
        backend_for(torch.device("mps"))


def test_the_context_refuses_what_needs_blocks():
    for changes in ({"modules": ["Block"]}, {"level": "policy"}, {"keep_last_blocks": 2}):
        with pytest.raises(ConfigurationError, match="has no blocks"), offload_activations({"mode": "sync", **changes}):
            pass
    with pytest.raises(ConfigurationError, match="must be sync or async"), offload_activations("none"):
        pass


# -- the report ------------------------------------------------------------------------------------------------------


def test_the_report_says_what_happened():
    model, offload = Model(), running("sync", level="all", min_tensor_mib=1e-3)
    offload.attach(model, model.layers)
    model(batch()).sum().backward()
    text = offload.report()
    assert "out" in text
    assert f"in {offload.counters.copies_out} copies" in text
    assert "parameters and buffers: " in text
    assert "smaller than min_tensor_mib: " in text
    assert "unknown on this device" in text
    assert offload.report() is None, "once"


def test_a_peak_that_did_not_fall_is_said():
    counters = OffloadCounters(bytes_out=GIB, copies_out=1, peak_without=5 * GIB)
    fell = describe(counters, settings(), (GIB, 4 * GIB), 0.0, 4 * GIB)
    stayed = describe(counters, settings(), (GIB, 4 * GIB), 0.0, 6 * GIB)
    assert "DID NOT FALL" in stayed
    assert "DID NOT FALL" not in fell
    assert "at least 5.00 GiB without" in fell


def test_the_peak_is_followed_where_the_device_tells():
    offload = running("sync", level="all")
    offload._backend.allocated = lambda: 1000
    model = Model()
    offload.attach(model, model.layers)
    model(batch()).sum().backward()
    assert offload.counters.peak_without > 1000 + offload.host_bytes[1] // 2
    assert offload.counters.peak_without <= 1000 + offload.host_bytes[1]


CAUSES = {
    "ran with gradients": (OffloadCounters(), {}),
    "lower `min_tensor_mib`": (OffloadCounters(calls=1, stayed={"small": [3, 12]}, largest_small=10), {}),
    "level: all": (OffloadCounters(calls=1, stayed={"inner": [3, 12], "small": [1, 1]}), {}),
    "made elsewhere": (OffloadCounters(calls=2, hidden_calls=2), {}),
    "fits into `device_limit_gib`": (OffloadCounters(calls=1), {"device_limit_gib": 3}),
    "Not one tensor fits": (OffloadCounters(calls=1, stayed={"no_room": [1, 1]}), {}),
    "covers all chosen modules": (OffloadCounters(calls=1), {"keep_last_blocks": 4}),
    "parameters and buffers": (OffloadCounters(calls=1, stayed={"weights": [1, 1]}), {"keep_last_blocks": 0}),
}


def test_a_context_in_which_nothing_moves_says_why():
    with offload_activations("sync") as offload:
        torch.ones(8, requires_grad=True).sin().exp().sum().backward()
    with pytest.raises(ConfigurationError, match=r"0 bytes.*lower `min_tensor_mib`"):
        offload.report()


@pytest.mark.parametrize("words", CAUSES)
def test_zero_bytes_are_an_error_that_says_why(words):
    counters, changes = CAUSES[words]
    with pytest.raises(ConfigurationError, match="0 bytes in the first step") as caught:
        refuse_nothing_moved(counters, settings(**changes))
    assert words in str(caught.value)


def test_metrics_are_of_this_rank_since_the_start():
    model, offload = Model(), running("async", level="all")
    offload.attach(model, model.layers)
    for count in (1, 2):
        model(batch()).sum().backward()
        metrics = offload.metrics()
        assert metrics["offload/gib_out"] == offload.counters.bytes_out / GIB
        assert metrics["offload/copies"] % count == 0
    assert metrics["offload/host_peak_gib"] == offload.host_bytes[1] / GIB


def test_each_setting_has_a_unit_in_its_name_and_a_default():
    for entry in dataclasses.fields(ActivationOffload):
        assert entry.default is not dataclasses.MISSING
        if entry.type in ("float", "float | None"):
            assert entry.name.endswith(("_gib", "_mib"))
    assert ActivationOffload().prefetch_bytes == 1024 * MIB
    assert ActivationOffload(mode="sync").prefetch_bytes == 0
