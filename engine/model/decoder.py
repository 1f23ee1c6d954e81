"""Decoder that computes the layers of a transformers model with few, large operations."""
# A layer is four matrix products (queries, keys and values in one; output; gate and up in one; down), attention, and
# four kernels between them: two that add the output of attention or MLP to the residual and normalise the sum, one that
# rotates and writes to the KV cache, and one activation. In models like GPT-NeoX, where attention and MLP read the same
# residual, their sum is one kernel, and a second norm another. The decoder reads the model's own parameters: where it
# needs several matrices in one, the model's parameters become views of the joined matrix, so that the model takes no
# more memory and still works.

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmsched.engine.model.adapters import Adapters
from llmsched.engine.model.experts import ExpertParts
from llmsched.engine.model.latent_attention import LatentParts, tables_of
from llmsched.engine.model.modules import Linear, Norm, UnknownStructureError
from llmsched.engine.model.packed_modules import PackedLinear
from llmsched.engine.model.paged_cache import PagedContext, PagedModel, run_alone
from llmsched.engine.model.probe import AttentionCall
from llmsched.engine.model.recurrent_layers import LayerState
from llmsched.engine.model.structure import LayerParts, MlpParts, read_structure
from llmsched.kernels import reference
from llmsched.kernels.activations import Activation
from llmsched.kernels.dispatch import backend_name, load_backend
from llmsched.kernels.lora import LoraMatrices
from llmsched.kernels.packed_matrix import PackedMatrix

#: Number of tokens for which the decoder compares its logits with the model's.
TRIAL_TOKENS = 16
#: Largest norm of the differences of logits, relative to the logits' own spread, in float32 and in 16-bit types.
#: Rounding alone gives 0.16 for SmolLM2-135M in bfloat16 (the tokens are random); a forgotten factor gives about 1.
TRIAL_TOLERANCE, TRIAL_TOLERANCE_16 = 1e-3, 0.5
#: Types in which kernels for the CPU compute a whole layer.
RECORDED_TYPES = (torch.float32, torch.bfloat16)


class Product(NamedTuple):
    weight: Tensor | tuple[PackedMatrix, ...]  # of one projection, or of several projections in one matrix
    bias: Tensor | None
    lora: LoraMatrices | None = None

    def compute(self, kernels: Any, rows: Tensor, lora: Sequence[Any] = ()) -> Tensor:
        """Return the product with each row of `rows`. `lora` is the field of the PagedContext."""
        output: Tensor = kernels.linear(rows, self.weight, self.bias)
        if lora and self.lora is not None:
            kernels.add_lora(output, rows, self.lora, lora[0])
        return output


class Mlp(NamedTuple):
    up: Product
    down: Product
    activation: Activation
    gated: bool

    def compute(self, kernels: Any, rows: Tensor, lora: Sequence[Any]) -> Tensor:
        activate = kernels.gated if self.gated else kernels.activated
        return self.down.compute(kernels, activate(self.up.compute(kernels, rows, lora), self.activation), lora)


class LatentProducts(NamedTuple):
    """Matrix products that latent attention computes first, see LatentParts."""

    parts: LatentParts
    project: tuple[Product, ...]  # queries, or their narrow form, and latent vectors: together if they can be joined
    wide_query: Product | None

    def compute(self, kernels: Any, rows: Tensor, lora: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return the queries of all heads, and the latent vectors with rotary keys, before norms and rotation."""
        found = [each.compute(kernels, rows, lora) for each in self.project]
        width = self.parts.query.out_features
        query, compressed = found if len(found) == 2 else (found[0][:, :width], found[0][:, width:])
        narrow = self.parts.narrow
        if narrow is not None and self.wide_query is not None:
            normed = kernels.add_norm(query.contiguous(), None, *narrow.norm, **narrow.rule._asdict())
            query = self.wide_query.compute(kernels, normed, lora)
        return query, compressed


class Layer(NamedTuple):
    latent: LatentProducts | None  # in a layer with latent attention, which uses none of the next four fields
    project: Product | None
    #: Weights of norms of queries and of keys that `rotate_and_write` does not compute, see `head_norm_of`.
    other_norms: tuple[Tensor, ...]
    clip: float | None  # limits the size of queries, keys and values
    heads: dict[str, Any]  # keyword arguments of `rotate_and_write`
    rotary: int  # index of the layer's rotary embedding
    call: AttentionCall
    output: Product
    attention_norm: Tensor | None  # weights of a norm after attention
    middle_norm: Norm | None  # norm before the MLP, see `LayerParts.mlp_norm`
    mlp: Mlp | None  # in a layer with experts, the MLP that every token passes through, if there is one
    experts: ExpertParts | None
    shared_gate: Product | None
    mlp_norm: Tensor | None  # weights of a norm after the MLP
    next_norm: Norm | None  # first norm of the next layer, or the model's last norm


class LayerViews(NamedTuple):
    """Context of a step, and its slots and block tables for each group of layers."""

    context: PagedContext
    slots: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]


class FusedDecoder:
    """Decoder that runs a transformers model over the paged KV cache.

    The model must be in evaluation mode. `calls` describes the attention of each layer. Raises UnknownStructureError
    for a model that the decoder cannot compute, or whose adapters change modules that it does not know.
    """

    implementation: Literal["fused", "transformers"] = "fused"
    states: Sequence[LayerState] = ()

    def __init__(
        self,
        model: PreTrainedModel,
        calls: Sequence[AttentionCall],
        plain: PagedModel | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        parts = read_structure(model)
        self.layers, self.attention = [call.shape for call in calls], [call.attention for call in calls]
        self.vocab_size = parts.head.out_features
        self._parts, self._device, self._dtype = parts, model.device, parts.norm.weight.dtype
        self._kernels: Any = load_backend(backend_name(model.device.type))
        self._rule = parts.rule._asdict()
        #: Different rotary embeddings, by the name with which the model asks for them; False stands for none.
        self._rotaries: list[str | bool | None] = list(dict.fromkeys(map(_rotary, parts.layers, calls)))
        row = parts.norm.weight.detach()[None]
        _check_calls(calls, [cos.shape[1] for cos, _ in self._tables(row, torch.zeros_like(row[0, :1]))])
        self._adapters, self._adapted = adapters, set[nn.Module]()
        following = [layer.attention_norm for layer in parts.layers[1:]] + [parts.norm]
        self._layers = [
            self._fuse(layer, call, next_norm)
            for layer, call, next_norm in zip(parts.layers, calls, following, strict=True)
        ]
        self._head = product([parts.head])
        simple = all(layer.latent is None and layer.experts is None for layer in self._layers)
        self.recordable = simple and backend_name(self._device.type) == "cpu" and self._dtype in RECORDED_TYPES
        if adapters is not None and adapters.by_module.keys() != self._adapted:
            raise UnknownStructureError("adapters change modules that are not attention projections or MLPs")
        self._compare(model, plain)

    def _fuse(self, layer: LayerParts, call: AttentionCall, next_norm: Norm | None) -> Layer:
        traits, weights = self._parts.traits, layer.head_norms
        other = any(weight.shape != (call.shape.key_dim,) for weight in weights)
        options: dict[str, Any] = {"by_group": traits.by_group, "neighbours": self._parts.rotation.neighbours}
        if weights and not other:
            options |= zip(("query_weight", "key_weight"), weights, strict=True)
            options |= {"norm_last": traits.norm_last, "eps": self._rule["eps"], "offset": self._rule["offset"]}
        return Layer(
            latent=None if layer.latent is None else self._fuse_latent(layer.latent),
            project=self._product(layer.projections) if layer.projections else None,
            other_norms=weights if other else (),
            clip=layer.clip,
            heads=options,
            rotary=self._rotaries.index(_rotary(layer, call)),
            call=call,
            output=self._product([layer.output]),
            attention_norm=layer.branch_norms[0],
            middle_norm=layer.mlp_norm,
            mlp=None if layer.mlp is None else self._fuse_mlp(layer.mlp),
            experts=layer.experts,
            shared_gate=None if layer.shared_gate is None else self._product([layer.shared_gate]),
            mlp_norm=layer.branch_norms[1],
            next_norm=next_norm,
        )

    def _fuse_latent(self, parts: LatentParts) -> LatentProducts:
        linears = [parts.query, parts.compress]
        alike = len({(isinstance(each, PackedLinear), each.bias is None) for each in linears}) == 1
        project = (self._product(linears),) if alike else tuple(self._product([each]) for each in linears)
        return LatentProducts(parts, project, None if parts.narrow is None else self._product([parts.narrow.expand]))

    def _fuse_mlp(self, parts: MlpParts) -> Mlp:
        return Mlp(self._product(parts.up), self._product([parts.down]), parts.activation, parts.gated)

    def _product(self, linears: Sequence[Linear]) -> Product:
        """Join linear layers as `product(...)` does, together with the adapters' matrices for them."""
        if self._adapters is None:
            return product(linears)
        self._adapted |= self._adapters.by_module.keys() & set(linears)
        return product(linears)._replace(lora=self._adapters.matrices(linears))

    def forward(self, input_ids: Tensor, positions: Tensor, context: PagedContext, logit_rows: Tensor | None) -> Tensor:
        kernels, traits, factors = self._kernels, self._parts.traits, self._parts.factors
        lora = context.lora
        views = LayerViews(context, context.slot_mapping.unbind(0), context.block_tables.unbind(0))
        residual = _scaled(self._parts.embed(input_ids), factors.embedding)
        tables = self._tables(residual, positions)
        normed = self._normalised(residual, None, self._parts.layers[0].attention_norm)
        for index, layer in enumerate(self._layers):
            # Each tensor is an argument or replaces `branch`, so that none is kept longer than the memory plan says.
            attend = self._attend if layer.latent is None else self._attend_latents
            branch = attend(layer, normed, tables[layer.rotary], views, index)
            branch = _scaled(layer.output.compute(kernels, branch.flatten(1), lora), factors.residual)
            if traits.parallel:
                if layer.middle_norm is not None:
                    normed = self._normalised(residual, None, layer.middle_norm)
                branch += _scaled(self._mlp(layer, normed, lora), factors.residual)
            else:
                residual = normed if traits.after_norm else residual
                normed = self._normalised(residual, branch, layer.middle_norm, layer.attention_norm)
                del branch
                residual = normed if traits.after_norm else residual
                branch = _scaled(self._mlp(layer, normed, lora), factors.residual)
            normed = self._normalised(residual, branch, layer.next_norm, layer.mlp_norm)
        logits = self._head.compute(kernels, normed if logit_rows is None else normed[logit_rows])
        logits = _scaled(logits, 1 / factors.logits)
        softcap = self._parts.softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def _normalised(
        self, residual: Tensor, branch: Tensor | None, norm: Norm | None, branch_weight: Tensor | None = None
    ) -> Tensor:
        """Add `branch` to `residual` as `add_norm(...)` does. Without a norm, return the residual itself."""
        add_norm = self._kernels.add_norm
        if norm is not None:
            normed: Tensor = add_norm(residual, branch, *norm, branch_weight=branch_weight, **self._rule)
            return normed
        if branch is not None:
            residual += branch if branch_weight is None else add_norm(branch, None, branch_weight, **self._rule)
        return residual

    def _attend(
        self, layer: Layer, rows: Tensor, tables: tuple[Tensor, Tensor], views: LayerViews, index: int
    ) -> Tensor:
        """Write the keys and values of `rows` to the cache. Return the outputs of all heads, [T, heads, D]."""
        context, call = views.context, layer.call
        keys, values, group, scales = context.cache.of_layer(index)
        query = self._kernels.rotate_and_write(
            self._project(layer, rows, context.lora),
            *tables,
            keys,
            values,
            views.slots[group],
            kv_scales=scales,
            **layer.heads,
        )
        output: Tensor = self._kernels.paged_attention(
            query, keys, values, views.block_tables[group], context.cu_seqlens_q, context.context_lens,
            work=context.works[index], scale=call.scale, window=call.shape.window, softcap=call.softcap,
            sinks=call.sinks, slopes=call.slopes, kv_scales=scales,
        )  # fmt: skip
        return output

    def _attend_latents(
        self, layer: Layer, rows: Tensor, tables: tuple[Tensor, Tensor], views: LayerViews, index: int
    ) -> Tensor:
        """Write the latent vectors and rotary keys of `rows` to the cache. Return the outputs of all heads."""
        assert layer.latent is not None
        context, call, parts = views.context, layer.call, layer.latent.parts
        latents, rope_keys, group, scales = context.cache.of_layer(index)
        query, compressed = layer.latent.compute(self._kernels, rows, context.lora)
        query = query.view(len(query), call.heads, -1)
        self._kernels.rotate_and_write_latents(
            query, compressed, parts.norm.weight, *tables, latents, rope_keys, views.slots[group],
            eps=parts.rule.eps, offset=parts.rule.offset, interleaved=parts.interleaved, kv_scales=scales,
        )  # fmt: skip
        output: Tensor = self._kernels.latent_attention(
            query, latents, rope_keys, parts.weight, views.block_tables[group], context.cu_seqlens_q,
            context.context_lens, work=context.works[index], scale=call.scale, kv_scales=scales,
        )  # fmt: skip
        return output

    def _project(self, layer: Layer, rows: Tensor, lora: Sequence[Any]) -> Tensor:
        """Return queries, keys and values before their rotation."""
        assert layer.project is not None
        projected = layer.project.compute(self._kernels, rows, lora)
        start = 0
        for weight in layer.other_norms:
            part = projected[:, start : (start := start + weight.numel())]
            if weight.ndim == 1:
                part.copy_(self._kernels.add_norm(part.contiguous(), None, weight, **self._rule))
            else:
                part.copy_(reference.norm(part.view(-1, *weight.shape), weight, **self._rule).flatten(1))
        return projected if layer.clip is None else projected.clamp_(-layer.clip, layer.clip)

    def _mlp(self, layer: Layer, rows: Tensor, lora: Sequence[Any]) -> Tensor:
        """Return the output of the layer's MLP, or of its experts and the MLP beside them."""
        kernels = self._kernels
        output = None if layer.mlp is None else layer.mlp.compute(kernels, rows, lora)
        if layer.shared_gate is not None and output is not None:
            output *= layer.shared_gate.compute(kernels, rows, lora).sigmoid()
        if layer.experts is None:
            assert output is not None
            return output
        mixed = layer.experts.compute(kernels, rows)
        return mixed if output is None else mixed.add_(output)

    def _tables(self, hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the cosines and sines of each rotary embedding at `positions`, each [T, rotated dimensions]."""
        found = []
        for kind in self._rotaries:
            if kind is False or self._parts.rotary is None:
                cos = sin = hidden.new_empty(1, len(positions), 0)
            else:
                cos, sin = tables_of(
                    self._parts.rotary(hidden[None], positions[None], **({} if kind is None else {"layer_type": kind}))
                )
            # Rotary keys of latent attention keep the precision of the model's tables.
            dtype = hidden.dtype if self._parts.layers[0].latent is None else cos.dtype
            cos, sin = (self._parts.rotation.tables(table)[0].to(dtype).contiguous() for table in (cos, sin))
            found.append((cos, sin))
        return found

    def _compare(self, model: Any, plain: PagedModel | None) -> None:
        """Raise UnknownStructureError if the decoder's logits for a few tokens differ too much from the model's."""
        # A model that `plain` wraps cannot run on its own: its attention function needs a PagedContext.
        ids = torch.arange(TRIAL_TOKENS, device=self._device) * 7919 % self.vocab_size
        with torch.inference_mode():
            logits = model(input_ids=ids[None]).logits[0] if plain is None else run_alone(plain, ids, self._dtype)[0]
            expected, found = logits.float(), run_alone(self, ids, self._dtype)[0].float()
        spread = (expected - expected.mean(1, keepdim=True)).norm()
        difference = float((found - expected).norm() / spread)
        if not difference <= (TRIAL_TOLERANCE if self._dtype == torch.float32 else TRIAL_TOLERANCE_16):
            raise UnknownStructureError(f"its logits would differ by {difference:.2g} of their spread")


def _scaled(rows: Tensor, factor: float) -> Tensor:
    return rows if factor == 1 else rows.mul_(factor)


def _rotary(layer: LayerParts, call: AttentionCall) -> str | bool | None:
    return layer.kind if call.rotates and call.slopes is None else False


def _check_calls(calls: Sequence[AttentionCall], rotated: Sequence[int]) -> None:
    """Raise UnknownStructureError for attention that the decoder cannot compute."""
    # `rotated` has the number of rotated dimensions of a head for each rotary embedding.
    for call in calls:
        shape = call.shape
        if call.latent is not None:
            if set(rotated) != {call.latent.rope}:
                raise UnknownStructureError(f"rotary embeddings of {rotated} for keys of {call.latent.rope} numbers")
            continue
        if shape.key_dim != shape.value_dim:
            raise UnknownStructureError("keys and values differ in width")
        if max(rotated) > shape.key_dim:
            raise UnknownStructureError(f"rotary embeddings of {max(rotated)} for heads of {shape.key_dim} numbers")


def product(linears: Sequence[Linear]) -> Product:
    """Join linear layers into one with all their outputs. Their parameters become views of the joined tensors.

    Raises UnknownStructureError if only some of the layers have a bias or are quantised.
    """
    biases: list[Any] = [linear.bias for linear in linears if linear.bias is not None]
    if biases and len(biases) < len(linears):
        raise UnknownStructureError("only some of the projections have a bias")
    bias = joined(biases) if biases else None
    packed = [linear.matrix for linear in linears if isinstance(linear, PackedLinear)]
    if packed and len(packed) < len(linears):
        raise UnknownStructureError("only some of the projections are quantised")
    if packed:
        return Product(tuple(joined_rows(list(alike)) for _, alike in groupby(packed, lambda each: each.kind)), bias)
    return Product(joined([linear.weight for linear in linears if isinstance(linear, nn.Linear)]), bias)


def joined_rows(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Concatenate the rows of matrices of one kind. The tensors of the matrices become views of the result."""
    first = matrices[0]
    rows = {"codes": [each.codes for each in matrices], "scales": [each.scales for each in matrices]}
    if first.offsets is not None:
        rows["offsets"] = [each.offsets for each in matrices if each.offsets is not None]
    return first._replace(**{name: joined(parts) for name, parts in rows.items()})


def joined(parameters: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all parameters. The parameters become views of the result."""
    first = parameters[0].detach()
    place, storage, size = first.storage_offset(), first.untyped_storage().data_ptr(), 0
    for parameter in parameters:  # parameters that were joined before stay where they are
        if parameter.untyped_storage().data_ptr() != storage or parameter.storage_offset() != place + size:
            break
        size += parameter.numel()
    else:
        rows = sum(len(parameter) for parameter in parameters)
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.detach() for parameter in parameters])
    views = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return_freed_memory(whole.device)
    return whole


def return_freed_memory(device: torch.device) -> None:
    """Make the allocator return freed memory to the GPU or, on a CPU, to the operating system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)
