"""A GGUF file again with all matrices as Q8_0: `python -m tests.benchmarks.peers.requantise SOURCE TARGET`."""

import sys
from pathlib import Path

import gguf
import numpy as np

_Q8_0 = gguf.GGMLQuantizationType.Q8_0


def requantise(source: Path, target: Path) -> None:
    """Metadata are copied; vectors stay as they are."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        subkind = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=subkind)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, _Q8_0), raw_dtype=_Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    requantise(Path(sys.argv[1]), Path(sys.argv[2]))
