"""Groups of settings: mappings as YAML gives them, and what they refuse."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lightning_longctx import ConfigurationError, LongContextFSDPStrategy
from lightning_longctx.strategies import ActivationCheckpointing, ProcessSettings, ShardingSettings


def test_mappings_and_objects_are_the_same():
    given = LongContextFSDPStrategy(
        data_parallel_replicate_size=2,
        activation_checkpointing={"mode": "every_n", "n": 3},
        sharding={"prefetch": 2, "reduce_gradients": "last_micro_batch"},
        processes={"timeout": timedelta(hours=1)},
    )
    assert given.activation_checkpointing == ActivationCheckpointing("every_n", 3)
    assert given.sharding == ShardingSettings(prefetch=2, reduce_gradients="last_micro_batch")
    assert given.processes == ProcessSettings(timeout=timedelta(hours=1))
    assert LongContextFSDPStrategy(activation_checkpointing="full").activation_checkpointing.mode == "full"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharding": {"prefetsch": 2}}, r"strategy\.sharding\.prefetsch.*Did you mean `prefetch`"),
        ({"sharding": {"prefetch": 0}}, "prefetch.*must be a positive int"),
        ({"sharding": {"reduce_gradients": "sometimes"}}, "reduce_gradients.*must be one of"),
        ({"sharding": "full"}, "must be ShardingSettings"),
        ({"activation_checkpointing": "all"}, "must be one of .*every_n"),
        ({"activation_checkpointing": {"mode": "every_n", "n": 0}}, r"\.n` must be a positive int"),
        ({"activation_checkpointing": {"mode": "full", "reentrant": True}}, "must be false with FSDP2"),
        ({"activation_checkpointing": {"every": 2}}, "must be a field of ActivationCheckpointing"),
    ],
)
def test_what_does_not_exist_is_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        LongContextFSDPStrategy(**settings)
