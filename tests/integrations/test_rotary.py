"""Phi-3's ``longrope``, whose factors follow the largest position: fixed for a run, right in shared and packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_longctx import LongContextFSDPStrategy
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations import CausalLMModule
from lightning_longctx.integrations.rotary import fix_longrope
from lightning_longctx.strategies.refusals import check_token_mixing
from lightning_longctx.strategies.rows import RowSharder
from lightning_longctx.strategies.ulysses import Exchange, set_running_exchange
from lightning_longctx.topology import Topology
from tests.helpers.pool import run_ranks
from tests.integrations.rows import make_documents, pack, relative_error
from tests.integrations.test_parity import _SMALL

#: Short factors up to 16 positions, long ones beyond.
PHI3: dict[str, Any] = _SMALL | {
    "model_type": "phi3",
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 5.0, 7.0],
    },
}
#: One document beyond the original length, so that transformers takes the long factors for the whole row; the first
#: shard at sp 2 sees positions up to 10 only.
LENGTHS = (7, 30, 3)


def config_of(**changes: Any) -> Any:
    values = PHI3 | changes
    return AutoConfig.for_model(**values)


def whole_row(batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Transformers' own model on the unsharded row with a dense mask: token losses and gradients."""
    ours = CausalLMModule(config=PHI3, init_seed=0)
    ours.configure_model()
    model = AutoModelForCausalLM.from_config(config_of(), attn_implementation="eager")
    model.load_state_dict(ours.model.state_dict())  # type: ignore[union-attr]
    total = batch["input_ids"].shape[1]
    document = torch.bucketize(torch.arange(total), batch["cu_seqlens"][1:], right=True)
    allowed = (document[:, None] == document[None]) & torch.ones(total, total).tril().bool()
    mask = torch.zeros(1, 1, total, total).masked_fill(~allowed, torch.finfo(torch.float32).min)
    logits = model(batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[0], batch["shift_labels"][0], reduction="none")
    (losses.sum() / batch["loss_divisor"]).backward()
    return losses.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def fit_one_shard(sp: int, fixed: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's token losses, and its gradients summed over the ranks of the row."""
    import torch.distributed as dist

    topology = Topology()
    if sp > 1:
        dist.init_process_group("gloo")
        group, rank = dist.group.WORLD, dist.get_rank()
        topology = Topology(rank, sp, 0, 1, rank, sp, group, group, group, group, sp)
    module = CausalLMModule(config=PHI3, init_seed=0)
    if not fixed:
        import lightning_longctx.integrations.causal_lm as home

        home.fix_longrope = lambda config, longest: config
    try:
        module.configure_model()
    finally:
        if not fixed:
            home.fix_longrope = fix_longrope
    row = pack(make_documents(*LENGTHS))
    batch = RowSharder(topology).shard(row, row)
    set_running_exchange(Exchange(topology.sp_group))
    out = module.training_step(batch, 0)
    out["loss"].backward()
    set_running_exchange(None)
    gradients = {name: parameter.grad for name, parameter in module.model.named_parameters()}
    if sp > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return out["per_token_loss"][0], gradients


@pytest.mark.distributed
@pytest.mark.parametrize("sp", [1, 2, 4])
def test_phi3_equals_transformers_on_the_whole_row(sp: int) -> None:
    losses, gradients = whole_row(pack(make_documents(*LENGTHS)))
    ranks = run_ranks(fit_one_shard, sp, sp, True)
    assert relative_error(torch.cat([rank[0] for rank in ranks]), losses) <= 1e-5
    for name, expected in gradients.items():
        assert relative_error(ranks[0][1][name], expected) <= 1e-5, name


@pytest.mark.distributed
def test_left_alone_the_first_shard_rotates_with_other_factors() -> None:
    losses, _ = whole_row(pack(make_documents(*LENGTHS)))
    ranks = run_ranks(fit_one_shard, 2, 2, False)
    assert relative_error(torch.cat([rank[0] for rank in ranks]), losses) > 1e-3


@pytest.mark.parametrize(("longest", "kept"), [(16, "short_factor"), (17, "long_factor"), (None, "long_factor")])
def test_the_longest_document_of_the_run_decides(longest: int | None, kept: str) -> None:
    config = config_of()
    before = dict(config.rope_parameters)
    fixed = fix_longrope(config, longest).rope_parameters
    assert fixed["short_factor"] == fixed["long_factor"] == before[kept]
    assert dict(config.rope_parameters) == before, "the original is left alone"
    assert {key for key in fixed if fixed[key] != before[key]} <= {"short_factor", "long_factor"}


def test_other_rotations_are_left_alone() -> None:
    config = AutoConfig.for_model(**_SMALL, model_type="llama")
    assert fix_longrope(config, 10) is config


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_strategy_refuses_factors_that_follow_the_shard(kind: str) -> None:
    """A model of somebody's own module, which nobody fixed."""
    if kind == "longrope":
        model = AutoModelForCausalLM.from_config(config_of())
    else:
        scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**_SMALL, model_type="llama", rope_parameters=scaling)
        )
    check_token_mixing(model, 1)
    with pytest.raises(ConfigurationError, match=f"alike on all ranks of a row.*`{kind}` in `model.rotary_emb`"):
        LongContextFSDPStrategy(sequence_parallel_size=2).check_model(model)
    if kind == "longrope":
        check_token_mixing(AutoModelForCausalLM.from_config(fix_longrope(config_of(), 64)), 2)
