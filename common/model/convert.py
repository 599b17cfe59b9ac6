"""GGUF file to model folder: `python -m common.model.convert SOURCE DESTINATION`.

Prints one line per step of progress: stage, done, total, separated by tabs (empty where unknown). Weights come
out as fp32 safetensors, tied ones once, beside config.json, tokenizer files, chat template and
generation_config.json. Peak memory is the fp32 weights, the kept ones and one tensor.

Weights that the file stores in a plain block format are also kept as they are, in quantised.safetensors
(`kept_weights`), if they dequantise to the very tensor that transformers made of them.
"""

import functools
import importlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError
from common.model.gguf_blocks import read_blocks
from common.model.kept_weights import save_quantised
from common.model.quantize import GroupQuantised, dequantise


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
    report("reading the file")
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
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        parsed = reading.load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)
        tensors = parsed["tensors"]
        architecture = reading.read_field(reader, "general.architecture")[0]
        processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)
        names = reading.get_gguf_hf_weights_map(model, processor(config=parsed["config"]))
    except (ValueError, NotImplementedError, KeyError) as error:
        raise ConfigError(f"transformers cannot read this GGUF file: {error}") from error
    _write_weights(model, tensors, destination)
    save_quantised(destination, _kept(reader, names, tensors, config.get_text_config(decoder=True)))
    report("writing the tokenizer")
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
    report("writing the weights")
    destination.mkdir()
    weights = destination / "model.safetensors"
    save_file({name: tensors[name] for name in wanted}, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors keeps it to its owner


def _kept(reader: Any, names: dict[str, str], tensors: dict[str, Any], config: Any) -> dict[str, GroupQuantised]:
    """By transformers' name, what the file stores in a plain block format; without what no order of rows explains."""
    kept: dict[str, GroupQuantised] = {}
    for tensor in _report_each("keeping the stored weights", reader.tensors, len(reader.tensors)):
        expected = tensors.get(names.get(tensor.name, ""))
        stored = read_blocks(tensor.data, tensor.tensor_type.name)
        if stored is None or expected is None or expected.shape != stored.values.shape:
            continue
        for order in _row_orders(len(expected), config):
            ordered = stored if order is None else _reordered(stored, order)
            if dequantise(ordered).equal(expected):
                kept[names[tensor.name]] = ordered
                break
    return kept


def _row_orders(num_rows: int, config: Any) -> Iterator[torch.Tensor | None]:
    """As they are (None), then llama's: llama.cpp interleaves the two halves of a q or k head for its rotation."""
    yield None
    for field in ("num_attention_heads", "num_key_value_heads"):
        num_heads = getattr(config, field, None)
        if isinstance(num_heads, int) and num_heads > 0 and num_rows % (2 * num_heads) == 0:
            yield torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _reordered(weight: GroupQuantised, order: torch.Tensor) -> GroupQuantised:
    return GroupQuantised(weight.values[order], weight.scales[order], weight.minimums[order], weight.bits)


def _require_disk(reader: Any, folder: Path) -> None:
    """For fp32 weights, and at most as much as the file for those that are kept."""
    needed = sum(int(tensor.n_elements) * 4 + int(tensor.n_bytes) for tensor in reader.tensors)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"not enough disk space in {folder}: {needed / 2**20:.0f} MiB needed for the weights, "
            f"{free / 2**20:.0f} MiB free; free some or set BATON_CACHE to another folder"
        )


def _counted(tensors: list[Any], *_: object, **__: object) -> Iterator[Any]:
    return _report_each("dequantising", tensors, len(tensors))


def _report_each(stage: str, items: Iterable[Any], total: int) -> Iterator[Any]:
    for done, item in enumerate(items):
        report(stage, done, total)
        yield item
    report(stage, total, total)


def report(stage: str, done: int | None = None, total: int | None = None) -> None:
    """One step of progress, for `fetch.in_child`."""
    # Flushed at once: it also ends this process soon after its parent died (broken pipe)
    print(stage, "" if done is None else done, "" if total is None else total, sep="\t", flush=True)


if __name__ == "__main__":
    sys.exit(main())
