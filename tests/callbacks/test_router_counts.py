"""Counts against a recount of every decision: once for each token, under any checkpointing, compiled or not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_longctx.batch import PAD_SOURCE_ID
from lightning_longctx.callbacks.router_counts import RouterCounts, record_router_indices
from lightning_longctx.callbacks.router_sites import find_sites
from tests.callbacks.moe import CHECKPOINTING, EXPERTS, LAYERS, Block, MoEModule, recount
from tests.callbacks.toy import make_batch


def count(module: MoEModule, batches: Sequence[dict[str, Tensor]]) -> RouterCounts:
    counts = RouterCounts(find_sites(module), torch.device("cpu"))
    for batch in batches:
        counts.active, counts.padding = True, (batch["source_ids"] == PAD_SOURCE_ID).view(-1, 1)
        module.training_step(batch, 0)["loss"].backward()
        counts.active = False
    return counts


def tokens(counts: RouterCounts) -> list[list[int]]:
    return [site.tokens.tolist() for site in counts.read(counts.peek())]


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_each_token_counts_once(checkpointing: str) -> None:
    """Megatron-LM#1514: recomputation doubles what a router counts. 3 micro-batches of 16 tokens, 2 choices."""
    batches = [make_batch(seed, 5) for seed in range(3)]
    counts = count(MoEModule(checkpointing), batches)
    assert counts.settle() == []
    expected, padding = recount(batches)
    assert tokens(counts) == expected
    assert sum(site.padding for site in counts.read(counts.peek())) == padding > 0


def test_padding_does_not_count() -> None:
    """transformers#28505: 8 of 32 tokens are padding, 2 choices: 48, not 64."""
    batches = [make_batch(0, 5, padding=4), make_batch(1, 5, padding=4)]
    assert [sum(row) for row in tokens(count(MoEModule(), batches))] == [48] * LAYERS


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_gradients_are_bit_equal_with_and_without_counting(checkpointing: str) -> None:
    batch = make_batch(0, 5)
    plain, counted = MoEModule(checkpointing), MoEModule(checkpointing)
    plain.training_step(batch, 0)["loss"].backward()
    count(counted, [batch])
    for (name, one), (_, other) in zip(plain.named_parameters(), counted.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at intermediates, also without hooks
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_compiled_blocks_count_the_same(checkpointing: str) -> None:
    batches = [make_batch(seed, 5) for seed in range(2)]
    module = MoEModule(checkpointing)
    counts = RouterCounts(find_sites(module), torch.device("cpu"))
    for layer in module.layers:
        layer.compile(backend="aot_eager", fullgraph=checkpointing == "none")
    for batch in batches:
        counts.active, counts.padding = True, (batch["source_ids"] == PAD_SOURCE_ID).view(-1, 1)
        loss = module.training_step(batch, 0)["loss"]
        counts.active = False  # as the callback does before backward: a compiled block cannot tell that it runs again
        loss.backward()
    counts.settle()
    assert tokens(counts) == recount(batches)[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_one_compiled_block_serves_all_layers_and_is_not_compiled_again() -> None:
    """A program for each layer would pass the compiler's limit of eight, and the other layers would run uncompiled."""
    module, batches = MoEModule(), [make_batch(seed, 5) for seed in range(3)]
    counts = RouterCounts(find_sites(module), torch.device("cpu"))
    counts.padding = (batches[0]["source_ids"] == PAD_SOURCE_ID).view(-1, 1)
    for layer in module.layers:
        layer.compile(backend="eager", dynamic=False)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches:
            counts.active = True
            module.training_step(batch, 0)
            counts.settle()
            counts.take()


def test_attaching_again_after_a_detach_counts_once_and_leaves_nothing() -> None:
    module, batch = MoEModule(), make_batch(0, 5)
    count(module, [batch]).detach()
    assert tokens(count(module, [batch])) == recount([batch])[0]
    left = MoEModule()
    RouterCounts(find_sites(left), torch.device("cpu")).detach()
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in left.modules())
    assert all("_longctx_router_recorder" not in vars(part) for part in left.modules())


class Recording(nn.Module):
    """Routes in its own forward, where no module returns the indices, and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> Tensor:
        indices = self.gate(hidden).topk(2, dim=-1).indices
        record_router_indices(self, indices)
        outputs = torch.stack([expert(hidden) for expert in self.experts], 1)
        return outputs.gather(1, indices[..., None].expand(-1, -1, 8)).sum(1)


def test_what_a_module_records_counts() -> None:
    module, hidden = Recording(), torch.randn(7, 8)
    counts = RouterCounts(find_sites(module), torch.device("cpu"))
    counts.active = True
    module(hidden)
    assert counts.settle() == []
    chosen = module.gate(hidden).topk(2, dim=-1).indices
    assert tokens(counts) == [torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()]


def test_what_a_module_records_wins_over_what_is_found() -> None:
    class Both(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            record_router_indices(self, torch.zeros(len(hidden), 1, dtype=torch.int64))
            return super().forward(hidden)

    module = Both()
    counts = RouterCounts(find_sites(module), torch.device("cpu"))
    counts.active = True
    module(torch.randn(7, 8))
    counts.settle()
    assert tokens(counts) == [[7, 0, 0, 0, 0]]


def test_recording_without_the_callback_does_nothing() -> None:
    Recording()(torch.randn(3, 8))


def test_a_router_that_tells_nothing_is_named() -> None:
    class Silent(Recording):
        def forward(self, hidden: Tensor) -> Tensor:
            self.gate(hidden)
            return hidden

    module = nn.ModuleDict({"moe": Silent()})
    counts = RouterCounts(find_sites(module), torch.device("cpu"))
    counts.active = True
    module["moe"](torch.randn(3, 8))
    assert counts.settle() == ["moe"]


def test_the_input_of_the_experts_is_the_fallback() -> None:
    class Gate(nn.Linear):
        pass

    class Late(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate(8, EXPERTS)  # type: ignore[assignment]

        def forward(self, hidden: Tensor) -> Tensor:
            weights, indices = self.gate(hidden).topk(2, dim=-1)
            return self.experts(hidden, indices=indices, weights=weights)

    module = Late()
    counts = RouterCounts(find_sites(module), torch.device("cpu"))
    counts.active = True
    module(torch.randn(7, 8))
    assert counts.settle() == []
    assert sum(tokens(counts)[0]) == 14


def test_capacity_drops_and_indices_out_of_range_are_apart() -> None:
    module = Recording()
    counts = RouterCounts(find_sites(module), torch.device("cpu"))
    counts.active = True
    record_router_indices(module, torch.tensor([[0], [-1], [9], [4], [-3], [5]]))
    record_router_indices(module, torch.zeros(0, 1, dtype=torch.int64))
    counts.settle()
    (found,) = counts.read(counts.peek())
    assert found.tokens.tolist() == [1, 0, 0, 0, 1]
    assert (found.dropped, found.outside, found.padding, found.unmasked) == (1, 3, 0, 0)
    assert counts.largest().tolist() == [9]


def test_a_layer_that_first_runs_later_is_counted_from_then_on() -> None:
    module, batches = MoEModule(), [make_batch(seed, 5) for seed in range(2)]
    last, module.layers = module.layers[-1], module.layers[:-1]
    module.late = last
    counts = RouterCounts(find_sites(module), torch.device("cpu"))
    counts.active = True
    module.training_step(batches[0], 0)
    assert counts.settle() == []
    late = next(number for number, site in enumerate(counts.sites) if site.path == "late")
    assert sum(tokens(counts)[late]) == 0
    last.experts(torch.randn(4, 8), torch.tensor([[0, 1]] * 4), torch.ones(4, 2))  # only the experts tell
    counts.settle()
    assert tokens(counts)[late] == [4, 4, 0, 0, 0]
