"""Models of Hugging Face transformers, named ``hf:AutoModelForSequenceClassification`` in a config.

``model.pretrained`` is a folder that ``save_pretrained`` wrote, or a name on the Hub; without it, ``model_type`` among
the ``model.options`` says which architecture is made with random weights. All other options are those of its config.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from incofl.errors import ConfigError, nearest
from incofl.layout import Layout
from incofl.models.custom import check_module
from incofl.models.model import ModelOptions, first_line

PREFIX = "hf:"
EXAMPLE = "hf:AutoModelForSequenceClassification"
ATTENTION = ("eager", "sdpa")  # that of torch; others are code to be fetched


def make_hf(name: str, options: ModelOptions) -> tuple[nn.Module, Layout]:
    """The model of an auto class of transformers, with the classes and tokens of the data, and its inferred layout."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"model.name: {name} needs transformers: pip install 'incofl[lora]'") from None
    autos = [key for key in dir(transformers) if key.startswith("AutoModel")]
    if (own := name.removeprefix(PREFIX)) not in autos:
        raise ConfigError(f"model.name: got {name!r}, expected a class such as {EXAMPLE}{nearest(own, autos)}")
    auto = getattr(transformers, own)
    sizes = {"num_labels": options.classes} if options.classes and not options.sequence else {}
    with _quiet(transformers.logging):
        if options.pretrained is None:
            module = _random(transformers, auto, sizes, options)
        else:
            module = _pretrained(transformers, auto, sizes, options)
    tokens = getattr(module.config, "vocab_size", options.vocabulary)
    if tokens < options.vocabulary:
        want = f"expected at least the {options.vocabulary} of the data"
        raise ConfigError(f"model.name: {name} knows {tokens} tokens, {want}; was another tokenizer used?")
    if options.sequence:
        module.register_forward_hook(_classes_second)
    return check_module(name, module, None, options)


def _random(transformers: Any, auto: Any, sizes: dict[str, Any], options: ModelOptions) -> Any:
    given = dict(options.options)
    if (kind := given.pop("model_type", None)) is None:
        hint = "or model.options.model_type, such as 'bert'"
        raise ConfigError(f"model.pretrained: got none, expected a folder or a name on the Hub, {hint}")
    if options.vocabulary:
        sizes |= {"vocab_size": options.vocabulary}
    elif len(options.shape) == 3:
        sizes |= {"num_channels": options.shape[0], "image_size": options.shape[1]}
    try:
        config = transformers.AutoConfig.for_model(kind, **{**sizes, **given})
        return auto.from_config(config, trust_remote_code=False)
    except Exception as problem:  # an unknown architecture, or sizes that do not go together
        raise ConfigError(f"model.options: {kind!r} cannot be made: {first_line(problem)}") from None


def _pretrained(transformers: Any, auto: Any, sizes: dict[str, Any], options: ModelOptions) -> Any:
    where = str(options.pretrained)
    folder = Path(where).expanduser()
    local = folder.is_dir()
    if not local and (folder.is_absolute() or where.startswith((".", "~")) or where.count("/") > 1):
        raise ConfigError(f"model.pretrained: {where}: no such folder")
    try:
        if not local:
            import huggingface_hub

            huggingface_hub.hf_hub_download(where, "config.json")  # tells soonest that it cannot be reached
        place, never = str(folder) if local else where, {"trust_remote_code": False}  # nor code that comes with weights
        config = transformers.AutoConfig.from_pretrained(place, **sizes, **never)
        config._attn_implementation = None  # that of a folder could be one to be fetched
        _set_options(config, options.options)
        return auto.from_pretrained(
            place,
            config=config,
            ignore_mismatched_sizes=True,  # a head for other classes starts anew
            use_safetensors=True,  # pickled files can run code
            **never,
        )
    except ConfigError:
        raise
    except Exception as problem:  # of the network, the server, the name or the files: many types
        if local:
            raise ConfigError(f"model.pretrained: {where} cannot be loaded: {first_line(problem)}") from None
        hint = f"or download huggingface.co/{where} elsewhere and set model.pretrained to that folder"
        raise ConfigError(
            f"model.pretrained: cannot get {where!r} from the Hub ({first_line(problem)}); {hint}"
        ) from None


def _set_options(config: Any, given: Mapping[str, Any]) -> None:
    """Options of the architecture's own config, and no others: ``from_pretrained`` would take some that run code."""
    known = sorted({*config.to_dict(), *config.attribute_map, "num_labels", "torch_dtype"} - {"auto_map", "model_type"})
    for key, value in given.items():
        if key == "attn_implementation" and value in ATTENTION:
            config._attn_implementation = value
        elif key not in known:
            kind = config.model_type
            raise ConfigError(f"model.options: got {key!r}, expected an option of {kind}{nearest(key, known)}")
        else:
            setattr(config, key, value)


def _classes_second(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    """Logits of (batch, length, classes) as a task with a class for every position expects them."""
    logits: Tensor = getattr(output, "logits", output)
    return logits.transpose(1, 2)


@contextlib.contextmanager
def _quiet(bars: Any) -> Iterator[None]:
    """Drops the notes and bars of transformers while it loads: an error of ours says what is wrong in one line."""
    level, shown = logging.root.manager.disable, bars.is_progress_bar_enabled()
    logging.disable(logging.ERROR)
    bars.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(level)
        if shown:
            bars.enable_progress_bar()
