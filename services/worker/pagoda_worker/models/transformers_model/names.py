"""Finds the sources of a transformers module's parameters, by transformers' rules for checkpoints."""

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from pagoda_worker.models.transformers_model.hosted_experts import HostedExperts
from pagoda_worker.models.transformers_model.hosted_layers import hosted_linears
from pagoda_worker.models.weights import MadeWeights, WeightNames, WeightSource


def backbone_weights(
    model: PreTrainedModel, stored: Collection[str], ignored: Collection[str], optional: Collection[str]
) -> WeightNames:
    """All parameters of a module.

    Args:
        stored: the names of all tensors of the checkpoint.
        ignored: module names of tensors that a checkpoint may have but the module computes itself.
        optional: parameters that a checkpoint may omit.
    """
    experts = _stacked(model)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    inside = {place for _, places in experts.values() for place in places}
    parameters: dict[str, Any] = {name: value for name, value in model.named_parameters() if name not in inside}
    parameters |= dict.fromkeys(experts, True)
    known = (
        parameters
        | dict.fromkeys(ignored, True)
        | {target: parameters.get(source, True) for target, source in _tied(model).items()}
    )
    transposed = {f"{name}.weight" for name, layer in hosted_linears(model) if layer.is_transposed}
    sources: dict[str, WeightSource] = {}
    several: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    aliases: dict[str, str] = {}
    unknown = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target in _tied(model):
            aliases[_tied(model)[target]] = name
            unknown.append(name)
        elif pattern is not None and _made(by_pattern[pattern], target)[0] in parameters:
            several[target][pattern].append(name)
        elif target in parameters:
            sources[target] = WeightSource(name=name, parameter=target, is_transposed=target in transposed)
        elif target in ignored:
            unknown.append(name)
    made = tuple(
        _several(model, by_pattern[next(iter(patterns))], target, patterns) for target, patterns in several.items()
    )
    given = set(sources) | {parameter for one in made for parameter in one.parameters}
    for parameter in parameters:
        if parameter not in given and parameter not in optional:
            sources[parameter] = WeightSource(
                name=parameter, parameter=parameter, is_transposed=parameter in transposed
            )
    whole = [source for name, source in sources.items() if name in experts]
    made = (*(_unstacked(one, experts) for one in made), *(_unstacked(_alone(source), experts) for source in whole))
    return WeightNames(
        sources=[source for name, source in sources.items() if name not in experts],
        prefixes=("",),
        made=made,
        aliases={sources[name].name if name in sources else name: other for name, other in aliases.items()},
        ignored=(*_ignored(model), *(re.compile(f"^{re.escape(name)}$") for name in unknown)),
    )


def _stacked(model: PreTrainedModel) -> dict[str, tuple[HostedExperts, tuple[str, ...]]]:
    """Stacked parameters of transformers' rules that this module lacks, and the places of their parts."""
    return {
        f"{owner}.{name}": (module, tuple(f"{owner}.{place}" for place in places))
        for owner, module in model.named_modules()
        if isinstance(module, HostedExperts)
        for name, places in module.stacked()
    }


def _alone(source: WeightSource) -> MadeWeights:
    """A source of one tensor as one of several."""
    return MadeWeights(
        names=(source.name,),
        parameters=(source.parameter,),
        make=lambda tensors: {source.parameter: tensors[0]},
    )


def _unstacked(one: MadeWeights, experts: Mapping[str, tuple[HostedExperts, tuple[str, ...]]]) -> MadeWeights:
    """The names with the parts of each stacked parameter instead of it."""
    if not any(name in experts for name in one.parameters):
        return one

    def make(tensors: list[Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, value in one.make(tensors).items():
            if name in experts:
                module, places = experts[name]
                made |= dict(zip(places, module.split(value), strict=True))
            else:
                made[name] = value
        return made

    places = (place for name in one.parameters for place in (experts[name][1] if name in experts else (name,)))
    return MadeWeights(names=one.names, parameters=tuple(places), make=make)


def _tied(model: PreTrainedModel) -> Mapping[str, str]:
    return model.all_tied_weights_keys  # type: ignore[no-any-return]  # transformers: Any


def _ignored(model: PreTrainedModel) -> tuple[re.Pattern[str], ...]:
    rules = model._keys_to_ignore_on_load_unexpected or ()
    return (re.compile(r"rotary_emb\.(original_)?inv_freq$"), *(re.compile(rule) for rule in rules))


def _made(rule: WeightConverter, target: str) -> tuple[str, ...]:
    """Parameters that a rule makes, by the name of the first."""
    first = rule.target_patterns[0]
    return tuple(target.replace(first, pattern, 1) for pattern in rule.target_patterns)


def _several(
    model: PreTrainedModel, rule: WeightConverter, target: str, patterns: Mapping[str, list[str]]
) -> MadeWeights:
    counts = [(pattern, len(names)) for pattern, names in patterns.items()]

    def make(tensors: list[Tensor]) -> dict[str, Tensor]:
        converter, rest = copy.deepcopy(rule), list(tensors)
        for pattern, count in counts:
            for tensor in rest[:count]:
                converter.add_tensor(target, target, pattern, tensor)
            del rest[:count]
        made = converter.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    names = tuple(name for group in patterns.values() for name in group)
    return MadeWeights(names=names, parameters=_made(rule, target), make=make)
