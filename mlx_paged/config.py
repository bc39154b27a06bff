"""PagedConfig: every option once. Flags, MLX_PAGED_* variables and help texts come from its fields."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar, Generic, TypeVar, overload

from .engine.prefill import LATENCY_MS
from .errors import ConfigError, KernelUnavailableError
from .kernels.availability import device_unsupported_reason
from .kernels.quantized import GROUP_SIZES
from .kv.geometry import DEFAULT_GROUP_SIZE, PageFormat

MAX_PROMPT_LOOKUP = 64
LEAST_STATE_INTERVAL = 32  # tokens; a state takes the memory of many
QUANTIZED_KV_START = 5000  # mlx-lm's default
STOCK_BITS = (2, 3, 5, 6)  # bits that only mlx-lm's own quantised caches support
STOCK_QUANTISES = (
    "the paged cache supports kv_bits of 8, 4 or 8,4, and quantises from the first token on; with other kv_bits or "
    "another quantized_kv_start, these layers use mlx-lm's own cache"
)
QUANTIZED_KV_START_HELP = (
    "With --kv-bits: 0 and the default quantise each token of the paged cache when it is written. Any other number "
    "uses mlx-lm's own cache, quantised from that token on, one request at a time "
    f"(default: {QUANTIZED_KV_START})"
)
# Prefixes are whole blocks. On a CPU, computing a large block's tokens again costs more than stock's prompt cache does;
# on a GPU kernels are measured with large blocks (docs/adr/0103).
BLOCK_SIZE, BLOCK_SIZE_ON_CPU = 32, 8
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


Value = TypeVar("Value")


def choice(what: str, choices: Mapping[str, Value]) -> Callable[[Any], Value]:
    """Return a parser of one of some texts, in any case, or of one of the values that they stand for. It raises
    ConfigError for anything else."""

    def parse(given: Any) -> Value:
        if isinstance(given, str) and given.strip().lower() in choices:
            return choices[given.strip().lower()]
        for value in choices.values():
            if type(given) is type(value) and given == value:
                return value
        *names, last = choices
        raise ConfigError(f"{what} must be {', '.join(names)} or {last}, not {given!r}")

    return parse


def number(what: str, least: int, most: int | None = None, *, others: Mapping[str, int | None] | None = None) -> Any:
    """Return a parser of a whole number in a range, or of one of some other texts or the values that they stand for.
    It raises ConfigError for anything else."""
    known = others or {}

    def parse(given: Any) -> int | None:
        text = str(given).strip().lower()
        if text in known:
            return known[text]
        if given is None and None in known.values():
            return None
        is_whole = isinstance(given, int | str) and not isinstance(given, bool) and text.isdecimal()
        if is_whole and int(text) >= least and (most is None or int(text) <= most):
            return int(text)
        wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(
            f"{what} must be {''.join(f'{name}, or ' for name in known)}a whole number {wanted}, not {given!r}"
        )

    return parse


parse_block_size = choice("block size", {"auto": None, **{str(1 << power): 1 << power for power in range(3, 8)}})
parse_kernel = choice("kernel", {"auto": None, "on": True, "off": False})
parse_kv_group_size = choice("kv_group_size", {str(size): size for size in GROUP_SIZES})
parse_kv_rotate = choice("kv_rotate", {"on": True, "off": False, "1": True, "0": False})
parse_prompt_lookup = number("prompt_lookup", 0, MAX_PROMPT_LOOKUP)
parse_prefill_latency = number("prefill_latency", 1)
parse_state_interval = number("state_interval", LEAST_STATE_INTERVAL, others={"auto": None, "0": 0})


def parse_memory(text: str | int | None) -> int | None:
    """Return the bytes of ``2GB``, ``1.5GiB``, ``800M`` or ``1000000``; None for ``auto``.

    Decimal units (GB, G) are powers of 1000, as mlx-lm prints them; binary ones (GiB) powers of 1024.

    Raises:
        ConfigError: the text is no such size, or the size is not positive.
    """
    if text is None:
        return None
    if isinstance(text, str):
        if text.strip().lower() == "auto":
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
        if match is None or match[2] not in _UNITS:
            raise ConfigError(f"memory size must look like 2GB, 512MiB or auto, not {text!r}")
        value = int(float(match[1]) * _UNITS[match[2]])
    else:
        value = int(text)
    if value <= 0:
        raise ConfigError(f"memory size must be positive, not {text!r}")
    return value


def parse_kv_bits(value: str | int | Sequence[int] | None) -> int | tuple[int, int] | None:
    """Return the bits of keys and values in pages: 8, 4, or (8, 4) for ``8,4``; None for ``none``, which does not
    quantise. Raises ConfigError for anything else."""
    if value is None or value == "none":
        return None
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    try:
        k, v = parts if len(parts) > 1 else (parts[0], parts[0])
        pages = PageFormat.of((int(k), int(v)))
    except (ValueError, TypeError, IndexError):
        raise ConfigError(f"kv_bits must be 8, 4 or 8,4 (keys, values), not {value!r}") from None
    return pages.k_bits if pages.k_bits == pages.v_bits else (pages.k_bits, pages.v_bits)


def _kv_bits_argument(text: str) -> int | tuple[int, int] | None:
    """Parse ``--kv-bits``, which also takes the bits that only mlx-lm's own caches support."""
    if text.strip() in map(str, STOCK_BITS):
        return int(text)
    try:
        return parse_kv_bits(text)
    except ConfigError:
        raise ConfigError(
            f"must be 8, 4 or 8,4 (keys, values), or one of {', '.join(map(str, STOCK_BITS))} for mlx-lm's own "
            f"caches, got {text!r}"
        ) from None


Given = TypeVar("Given")
Kept = TypeVar("Kept")


@dataclass(eq=False)
class Option(Generic[Given, Kept]):
    """A field of :class:`PagedConfig` or of the server's options, with its flag, its help and, in the former, its
    variable.

    Args:
        default: value if the option is not given.
        parse: converts a given value to the one that is kept, or raises ConfigError; returns a kept value as it is.
        text: description of the option.
        metavar: placeholder for the value in the help; None: the flag is a switch.
        default_text: description of the default; empty: the default itself, "none" or "off".
        flag: the flag; empty: the field's name with dashes.
        argument: parses the flag's value; None: ``parse``.
        repeats: the flag may be given several times; ``parse`` gets a list, or None without any.
    """

    default: Kept
    parse: Callable[[Given], Kept]
    text: str
    metavar: str | None = None
    _: KW_ONLY
    default_text: str = ""
    flag: str = ""
    argument: Callable[[str], Any] | None = None
    repeats: bool = False

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        prefix = getattr(owner, "PREFIX", "")
        self.variable = prefix and prefix + name.upper()
        self.flag = self.flag or f"--{name.replace('_', '-')}"
        nothing = "off" if self.metavar is None else "none"
        self.default_text = self.default_text or (str(self.default) if type(self.default) is int else nothing)

    @overload
    def __get__(self, instance: None, owner: type) -> Kept: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Kept: ...
    def __get__(self, instance: object | None, owner: type) -> Kept:
        return self.default if instance is None else instance.__dict__[self.name]  # type: ignore[no-any-return]

    def __set__(self, instance: object, value: Given | Kept) -> None:
        instance.__dict__[self.name] = self.parse(value)  # type: ignore[arg-type]

    def add_to(self, group: Any, dest: str, default: Any = argparse.SUPPRESS) -> None:
        """Add the flag to a parser or a group of one."""
        how: dict[str, Any] = {"type": self.converter, "metavar": self.metavar}
        if self.repeats:
            how["action"] = "append"
        elif self.metavar is None:  # a variable that is set can be overridden by --no-...
            switch = argparse.BooleanOptionalAction if self.variable else f"store_{not self.default}".lower()
            how = {"action": switch}
        group.add_argument(self.flag, dest=dest, default=default, help=self.help, **how)

    @property
    def converter(self) -> Callable[[str], Any]:
        """The flag's ``type``, for argparse."""
        return argument_type(self.argument or self.parse)

    @property
    def help(self) -> str:
        """Help text of the flag, for argparse."""
        variable = f"; also {self.variable}" if self.variable else ""
        return f"{self.text} (default: {self.default_text}){variable}".replace("%", "%%")


class Options:
    """A set of options.

    Attributes:
        PREFIX: what the options' variables begin with; "": they have none.
    """

    PREFIX: ClassVar[str] = ""

    @classmethod
    def options(cls) -> list[Option[Any, Any]]:
        """Return all options, in their order."""
        return [each for each in vars(cls).values() if isinstance(each, Option)]


@dataclass(frozen=True)
class PagedConfig(Options):
    """Options of the paged cache. Values are checked, and strings are parsed, when an instance is made. ``mlx_paged
    --help`` describes the options as below.

    Example:
        >>> apply_patches(PagedConfig(block_size=16, kv_cache_memory="2GB", kernel="on"))

    Raises:
        ConfigError: a value is unusable.
    """

    PREFIX: ClassVar[str] = "MLX_PAGED_"

    block_size: Option[int | str | None, int | None] = Option(
        None,
        parse_block_size,
        "Tokens per KV cache block: 8, 16, 32, 64, 128, or auto, which is 32, on a CPU 8",
        "TOKENS",
        default_text="auto",
        flag="--kv-block-size",
    )
    kv_cache_memory: Option[int | str | None, int | None] = Option(
        None,
        parse_memory,
        "Memory limit of a model's KV block pool: 2GB, 512MiB, or auto, which is 80 % of the memory that the weights "
        "leave, on a Mac 60 %",
        "SIZE",
        default_text="auto",
    )
    kernel: Option[bool | str | None, bool | None] = Option(
        None,
        parse_kernel,
        "Fused paged-attention kernel: auto uses it on a GPU if it supports the model and passes its self-check, "
        "otherwise MLX's attention over gathered blocks; off always uses the latter; on raises an error if the kernel "
        "cannot run",
        "{auto,on,off}",
        default_text="auto",
    )
    kv_bits: Option[int | str | Sequence[int] | None, int | tuple[int, int] | None] = Option(
        None,
        parse_kv_bits,
        "Quantise keys and values when they are written to the KV cache: to 8 or 4 bits, or 8,4 for keys to 8 and "
        "values to 4. Requests are still batched and still share prefixes. 2, 3, 5 and 6 bits use mlx-lm's own caches",
        "BITS",
        argument=_kv_bits_argument,
    )
    kv_group_size: Option[int | str, int] = Option(
        DEFAULT_GROUP_SIZE,
        parse_kv_group_size,
        "Number of values that share a scale and a bias, with --kv-bits: 32, 64 or 128",
        "VALUES",
    )
    kv_rotate: Option[bool | str, bool] = Option(
        False,
        parse_kv_rotate,
        "With --kv-bits: rotate keys and values by a Hadamard matrix before they are quantised. With 4 bits, results "
        "are closer to those of an unquantised cache. Prompt caches are saved dequantised",
    )
    prompt_lookup: Option[int | str, int] = Option(
        0,
        parse_prompt_lookup,
        "In batches (--prompts-file, the server): propose up to this many tokens per step (0 to 64) by looking them up "
        "in the prompt and the answer so far. Faster if an answer repeats its prompt; the distribution of the output "
        "does not change",
        "TOKENS",
    )

    state_interval: Option[int | str | None, int | None] = Option(
        None,
        parse_state_interval,
        "For models with states besides keys and values (Mamba, linear attention, convolutions): tokens of a prompt "
        "between two checkpoints of the states in the prefix cache. The ends of messages, prompts and answers have "
        "checkpoints, too; with 0 only these do. auto is 64 to 4096, depending on the size of the states",
        "TOKENS",
        default_text="auto",
    )

    prefill_latency: Option[int | str, int] = Option(
        LATENCY_MS,
        parse_prefill_latency,
        "Time limit in milliseconds for the prompts of one step while other requests decode or wait, on a Mac and on a "
        "CPU. A step's prompts halve after one that took longer, and double after one that took less than half. Lower "
        "values keep decoding steady, higher ones speed up prompts",
        "MS",
    )

    @property
    def tokens_per_block(self) -> int:
        """Block size on MLX's default device."""
        known = BLOCK_SIZE if device_unsupported_reason() is None else BLOCK_SIZE_ON_CPU
        return known if self.block_size is None else self.block_size

    @property
    def page_format(self) -> PageFormat | None:
        """Format of quantised pages; None: keys and values are not quantised."""
        return None if self.kv_bits is None else PageFormat.of(self.kv_bits, self.kv_group_size, self.kv_rotate)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> PagedConfig:
        """Return the options set by their ``MLX_PAGED_*`` variables; an empty variable counts as not set."""
        env = os.environ if env is None else env
        given = {option.name: option.variable for option in cls.options() if env.get(option.variable)}
        try:
            return cls(**{name: env[variable] for name, variable in given.items()})  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"environment variable(s) {', '.join(given.values())}: {error}") from None

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per option to a parser; a flag overrides its variable. A flag that mlx-lm's parser has already
        gets the type and the help of the option here."""
        group = parser.add_argument_group("paged KV cache")
        start = parser._option_string_actions.get("--quantized-kv-start")
        if start is not None:
            start.help = QUANTIZED_KV_START_HELP
        for option in cls.options():
            known = parser._option_string_actions.get(option.flag)
            if known is not None:
                known.type, known.metavar, known.help = option.converter, option.metavar, option.help
                if known.default is not None:
                    known.default = getattr(cls.from_env(), option.name)
                continue
            option.add_to(group, f"paged_{option.name}")

    def with_arguments(self, args: argparse.Namespace) -> PagedConfig:
        """Return this configuration with the flags of the command line, except those that mlx-lm's parser has, too."""
        given = {f.name: getattr(args, f"paged_{f.name}") for f in fields(self) if hasattr(args, f"paged_{f.name}")}
        return replace(self, **given)

    def check_rotation(self) -> None:
        """Raise ConfigError if ``kv_rotate`` is set without ``kv_bits``."""
        if self.kv_rotate and self.kv_bits is None:
            raise ConfigError("kv_rotate requires kv_bits of 8, 4 or 8,4")

    def check_kernel(self) -> None:
        """Raise KernelUnavailableError if ``kernel`` is on, and no kernel can run on this device."""
        why = device_unsupported_reason() if self.kernel else None
        if why is not None:
            raise KernelUnavailableError(f"kernel=on, but {why}; use auto or off (gather-then-SDPA)")


class KVBits:
    """``kv_bits``, ``kv_group_size`` and ``quantized_kv_start`` of a call or a command.

    mlx-lm's caches hold keys and values unquantised until they are ``quantized_kv_start`` tokens long, and are then
    quantised as a whole. Pages are quantised from the first token on: they support a start of 0, and take mlx-lm's
    default of 5,000 for 0, but no other start (docs/adr/0026).

    Args:
        bits: 8, 4 or (8, 4) for pages; mlx-lm's own caches also support others.
        group_size: values that share a scale and a bias.
        start: ``quantized_kv_start``, see above.

    Attributes:
        format: format of the pages; None: pages do not support these options.
        why_not: why pages do not support them, or None.
    """

    def __init__(
        self, bits: int | tuple[int, int], group_size: int = DEFAULT_GROUP_SIZE, start: int = QUANTIZED_KV_START
    ) -> None:
        self.bits, self.group_size = bits, group_size
        self.format: PageFormat | None = None
        self.why_not: str | None = None
        try:
            page_format = PageFormat.of(bits, group_size)
        except ConfigError as error:
            self.why_not = str(error)
            return
        if start in (0, QUANTIZED_KV_START):
            self.format = page_format
        else:
            self.why_not = (
                f"quantized_kv_start must be 0 or {QUANTIZED_KV_START} (the default) for the paged cache, got {start}"
            )

    @classmethod
    def of(cls, options: dict[str, Any]) -> KVBits | None:
        """Return the values in a call's options; None if they have no ``kv_bits``."""
        if options.get("kv_bits") is None:
            return None
        group_size = options.get("kv_group_size", DEFAULT_GROUP_SIZE)
        return cls(options["kv_bits"], group_size, options.get("quantized_kv_start", QUANTIZED_KV_START))

    def configured(self, config: PagedConfig) -> PagedConfig:
        """Return a configuration with these options' page format; without quantisation if pages do not support it."""
        if self.format is None:
            return replace(config, kv_bits=None)
        return replace(config, kv_bits=self.bits, kv_group_size=self.group_size)


def argument_type(parse: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Return an argparse type that calls ``parse`` and reports its ConfigError as argparse's error."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
