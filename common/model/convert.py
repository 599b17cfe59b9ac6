"""GGUF file to model folder: `python -m common.model.convert SOURCE DESTINATION`.

Prints one line per step of progress: stage, done, total, separated by tabs (empty where unknown). Weights come
out as fp32 safetensors, tied ones once, beside config.json, tokenizer files, chat template and
generation_config.json. Peak memory is the fp32 weights plus one tensor.
"""

import functools
import importlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.errors import ConfigError


def main() -> int:
    source, destination = Path(sys.argv[1]), Path(sys.argv[2])
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the file; never ask the network about it
    try:
        convert(source, destination)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def convert(source: Path, destination: Path) -> None:
    """Write the folder `destination`. ConfigError for files that transformers cannot read, or a full disk."""
    _report("reading the file")
    gguf: Any = importlib.import_module("gguf")  # untyped, as all that follow, and patched
    # Parsing the vocabulary takes seconds and would be done four times
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    try:
        reader = gguf.GGUFReader(str(source))
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"this is no GGUF file that can be read, or only a part of one: {error}") from error
    _require_disk(reader, destination.parent)
    transformers: Any = importlib.import_module("transformers")
    reading: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    reading.tqdm = _counted  # its loop over the tensors is the slow part
    transformers.logging.set_verbosity_error()
    where: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    try:
        config = transformers.AutoConfig.from_pretrained(**where)
        with importlib.import_module("torch").device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        tensors = reading.load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    except (ValueError, NotImplementedError, KeyError) as error:
        raise ConfigError(f"transformers cannot read this GGUF file: {error}") from error
    _write_weights(model, tensors, destination)
    _report("writing the tokenizer")
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    config.save_pretrained(destination)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(destination)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(destination)


def _write_weights(model: Any, tensors: dict[str, Any], destination: Path) -> None:
    from safetensors.torch import save_file

    tied = model.all_tied_weights_keys
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}
    missing = sorted(name for name in wanted if name not in tensors)
    if missing:
        raise ConfigError(f"this GGUF file lacks {len(missing)} tensors of a {type(model).__name__}: {missing[:3]}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ConfigError(f"tensor {name} is {tuple(tensors[name].shape)}, the model wants {tuple(shape)}")
    _report("writing the weights")
    destination.mkdir()
    weights = destination / "model.safetensors"
    save_file({name: tensors[name] for name in wanted}, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors keeps it to its owner


def _require_disk(reader: Any, folder: Path) -> None:
    needed = sum(int(tensor.n_elements) for tensor in reader.tensors) * 4
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"not enough disk space in {folder}: {needed / 2**20:.0f} MiB needed for fp32 weights, "
            f"{free / 2**20:.0f} MiB free; free some or set BATON_CACHE to another folder"
        )


def _counted(tensors: list[Any], *_: object, **__: object) -> Iterator[Any]:
    return _report_each("dequantising", tensors, len(tensors))


def _report_each(stage: str, items: Iterable[Any], total: int) -> Iterator[Any]:
    for done, item in enumerate(items):
        _report(stage, done, total)
        yield item
    _report(stage, total, total)


def _report(stage: str, done: int | None = None, total: int | None = None) -> None:
    # Flushed at once: it also ends this process soon after its parent died (broken pipe)
    print(stage, "" if done is None else done, "" if total is None else total, sep="\t", flush=True)


if __name__ == "__main__":
    sys.exit(main())
