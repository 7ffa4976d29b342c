"""What runs where: architecture x format x GPU generation x target x TensorRT-LLM x driver, with the end of each lane.

No rule is written here. Precisions and features are asked from config/legality.py, one config per combination;
architectures from models.toml; images, drivers and dates from toolchains.toml.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal, get_args

from pipeline.config import legality, words
from pipeline.config.keys import KEYS
from pipeline.config.schema import BuildConfig, LayerFormat
from pipeline.errors import ConfigError, Problem
from pipeline.targets.tensorrt_llm import toolchains
from pipeline.targets.tensorrt_llm.models import models
from pipeline.targets.tensorrt_llm.toolchains import Toolchain

# yes: nothing speaks against it; warning: it runs with a drawback, or upstream's table does not list it;
# unknown: no source says whether the architecture is served; no: it is refused.
Verdict = Literal["yes", "warning", "unknown", "no"]

ENGINES: Final = "tensorrt_llm"
TARGETS: Final = (ENGINES, "tensorrt_llm_llmapi")
HEADER: Final = (
    *("architecture", "target", "format", "kv cache", "reuse with", "SM", "GPUs", "TensorRT-LLM", "image", "CUDA"),
    *("driver", "verdict", "why", "end of life"),
)
# A group that every grouped format of a target accepts, so that no row is refused for a size nobody asked about.
_GROUP_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which rows are wanted; empty is all.

    Attributes:
        architectures: class names or families of upstream's table ("Qwen"), case does not matter.
        formats: our format words.
        gpus: GPU words; a row stands for all GPUs of one generation.
        targets: tensorrt_llm, tensorrt_llm_llmapi.
        toolchains: TensorRT-LLM versions or image tags.
        driver: an installed driver such as "575.57.08"; rows that need a newer branch are left out.
        only_working: leave out what is refused.
    """

    architectures: Sequence[str] = ()
    formats: Sequence[str] = ()
    gpus: Sequence[str] = ()
    targets: Sequence[str] = ()
    toolchains: Sequence[str] = ()
    driver: str | None = None
    only_working: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One combination and what is known about it.

    Attributes:
        kv_caches: KV cache formats that work with it; empty when the combination does not.
        reusable: those of them that keep block reuse and chunked context.
        gpus: config words of the GPUs of this generation.
        driver: what the image lists; driver_branch is the oldest branch that starts it.
        why: reasons of a verdict other than yes.
        ends: how long this lane lives.
    """

    architecture: str
    target: str
    format: str
    kv_caches: tuple[str, ...]
    reusable: tuple[str, ...]
    sm: int
    gpus: tuple[str, ...]
    tensorrt_llm: str
    image_tag: str
    cuda: str
    driver: str
    driver_branch: int
    verdict: Verdict
    why: tuple[str, ...]
    ends: str

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of HEADER; "-" is nothing."""
        return (
            self.architecture,
            self.target,
            self.format,
            _list(self.kv_caches),
            _list(self.reusable),
            str(self.sm),
            _list(self.gpus),
            self.tensorrt_llm,
            self.image_tag,
            self.cuda,
            f"R{self.driver_branch}+ (lists {self.driver})",
            self.verdict,
            "; ".join(self.why) or "-",
            self.ends,
        )


@dataclass(frozen=True, kw_only=True)
class _Named:
    """An architecture by name alone, with sizes that no rule about sizes objects to."""

    architecture: str
    dtype: str = "bfloat16"
    hidden_size: int = 4096
    intermediate_size: int = 16384
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    num_hidden_layers: int = 32
    vocab_size: int = 32768
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = False
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Judgement:
    verdict: Verdict
    why: tuple[str, ...]
    kv_caches: tuple[str, ...]
    reusable: tuple[str, ...]


def architectures() -> tuple[str, ...]:
    """Every architecture that one of the tables names, sorted."""
    table = models()
    named = {name for family in table.families for name in family.architectures}
    mapped = {name for names in table.classes.values() for name in names}
    tried = {name for row in legality.table().architectures for name in row.names}
    return tuple(sorted(named | mapped | tried | table.unsettled | table.llm_api_only | table.llm_api_seen))


def rows(filters: Filters = Filters()) -> list[Row]:
    """The matrix.

    Returns:
        One row per combination, by architecture, target, TensorRT-LLM (newest first), SM and format.

    Raises:
        ConfigError: a filter names something that no table has.
    """
    return [row for row in _rows(filters) if not (filters.only_working and row.verdict == "no")]


def _rows(filters: Filters) -> Iterator[Row]:
    targets = _chosen("target", filters.targets, TARGETS)
    formats = _chosen("format", filters.formats, get_args(LayerFormat))
    generations = _generations(_chosen("GPU", filters.gpus, tuple(legality.gpus())))
    images = [row for row in _images(filters.toolchains) if _starts(row, filters.driver)]
    for architecture in _architectures(filters.architectures):
        for target in targets:
            for image in images:
                for gpus in generations.values():
                    for form in formats:
                        yield _row(architecture, target, image, gpus, form)


def _row(architecture: str, target: str, image: Toolchain, gpus: tuple[str, ...], form: str) -> Row:
    judged = _judge(architecture, target, gpus[0], form)
    return Row(
        architecture=architecture,
        target=target,
        format=form,
        kv_caches=judged.kv_caches,
        reusable=judged.reusable,
        sm=legality.gpus()[gpus[0]].sm,
        gpus=gpus,
        tensorrt_llm=image.tensorrt_llm,
        image_tag=image.tag,
        cuda=image.cuda,
        driver=image.driver,
        driver_branch=image.driver_branch,
        verdict=judged.verdict,
        why=judged.why,
        ends=_end_of_life(target, image),
    )


@cache
def _judge(architecture: str, target: str, gpu: str, form: str) -> _Judgement:
    """Judge one combination, with a 16-bit KV cache first and then with each of the others."""
    problems = _problems(architecture, target, gpu, form, "auto", reuse=False)
    refused = [problem.message.rstrip(".") for problem in problems if problem.severity == "error"]
    verdict, why = _served_by_engine(architecture, form) if target == ENGINES else _served_by_llm_api(architecture)
    if refused:
        return _Judgement(verdict="no", why=tuple(dict.fromkeys(refused)), kv_caches=(), reusable=())
    if verdict == "no":
        return _Judgement(verdict="no", why=why, kv_caches=(), reusable=())
    drawbacks = tuple(problem.message.rstrip(".") for problem in problems)
    works = {
        (kv_cache, reuse): not _errors(_problems(architecture, target, gpu, form, kv_cache, reuse=reuse))
        for kv_cache in _choices("quantization.kv_cache")
        for reuse in (False, True)
    }
    return _Judgement(
        verdict="warning" if drawbacks and verdict == "yes" else verdict,
        why=(*why, *drawbacks),
        kv_caches=tuple(kv_cache for (kv_cache, reuse), fits in works.items() if fits and not reuse),
        reusable=tuple(kv_cache for (kv_cache, reuse), fits in works.items() if fits and reuse),
    )


def _problems(architecture: str, target: str, gpu: str, form: str, kv_cache: str, *, reuse: bool) -> list[Problem]:
    dtype = "float16" if form == "fp16" else "bfloat16"
    config = BuildConfig.model_validate(
        {
            "name": "matrix",
            "source": {"path": "."},
            "quantization": {"format": form, "kv_cache": kv_cache, "group_size": _GROUP_SIZE},
            "engine": {
                "target": target,
                "gpu": gpu,
                "dtype": dtype,
                # One prompt fits into an iteration, so that leaving chunked context off is no finding of its own.
                "max_num_tokens": 8192,
                "enable_chunked_context": reuse,
                "kv_cache": {"enable_block_reuse": reuse},
            },
        }
    )
    return legality.check(config, _Named(architecture=architecture, dtype=dtype))


def _errors(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def _served_by_engine(architecture: str, form: str) -> tuple[Verdict, tuple[str, ...]]:
    """What upstream's tables say about an architecture in the engine lane."""
    table = models()
    if architecture in table.llm_api_only:
        return "no", (f"{architecture} has no engine path, only the LLM API",)
    if architecture in table.unsettled:
        return "unknown", ("in one of two versions of upstream's map of architectures; the pinned image decides",)
    if table.model_class(architecture) is None:
        return "no", (f"trtllm-build has no class for {architecture}",)
    support, note = table.support(architecture, form)
    return ("yes", ()) if support == "yes" else ("warning", (note or f"upstream's table does not list {form} for it",))


def _served_by_llm_api(architecture: str) -> tuple[Verdict, tuple[str, ...]]:
    """What is known about an architecture in the LLM API's lane."""
    if architecture in models().llm_api_only | models().llm_api_seen:
        return "yes", ()
    return "unknown", ("no source read here says that the LLM API serves it; try it with trtllm-serve",)


def _end_of_life(target: str, image: Toolchain) -> str:
    if target != ENGINES:
        return "goes on: the only lane from 1.3 on"
    release = next((row for row in toolchains.table().releases if row.tensorrt_llm == image.tensorrt_llm), None)
    return release.ends if release is not None else "ended: not offered for engines any more"


def _generations(names: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """GPUs by compute capability, oldest first."""
    by_sm: dict[int, tuple[str, ...]] = {}
    for name in names:
        sm = legality.gpus()[name].sm
        by_sm[sm] = (*by_sm.get(sm, ()), name)
    return dict(sorted(by_sm.items()))


def _images(wanted: Sequence[str]) -> list[Toolchain]:
    """The default image of each offered version; of a named version too; a named tag is taken as it is."""
    table = toolchains.table()
    if not wanted:
        return [toolchains.by_tag(tag) for tag in table.default.values()]
    known = {row.tag: row for row in table.toolchains}
    newest = {row.tensorrt_llm: row for row in reversed(table.toolchains)}
    newest |= {version: known[tag] for version, tag in table.default.items()}
    return [(known | newest)[word] for word in _chosen("toolchain", wanted, (*known, *newest))]


def _starts(image: Toolchain, driver: str | None) -> bool:
    if driver is None:
        return True
    branch = toolchains.release_of(driver.lstrip("Rr"))
    if not branch:
        raise ConfigError(f"'{driver}' is not a driver version", hint="Write it as nvidia-smi does, such as 575.57.08.")
    return branch[0] >= image.driver_branch


def _architectures(wanted: Sequence[str]) -> tuple[str, ...]:
    families = {family.name: family.architectures for family in models().families}
    chosen = _chosen("architecture", wanted, (*architectures(), *families))
    if not wanted:
        return architectures()
    return tuple(dict.fromkeys(name for word in chosen for name in families.get(word, (word,))))


def _choices(path: str) -> tuple[str, ...]:
    return tuple(str(choice) for choice in KEYS[path].choices)


def _chosen(what: str, wanted: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The known words that `wanted` names, in its order; all when it is empty."""
    if not wanted:
        return tuple(known)
    by_plain = {word.lower(): word for word in reversed(known)}
    for word in wanted:
        if word.lower() not in by_plain:
            near = words.nearest(word, known)
            hint = f"Did you mean '{near}'?" if near else f"Known: {', '.join(known)}."
            raise ConfigError(f"the matrix has no {what} '{word}'", hint=hint)
    return tuple(by_plain[word.lower()] for word in wanted)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "-"
