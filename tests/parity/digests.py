"""Digests of models, by which their bits are compared."""

import hashlib

from torch import nn
from torch.distributed.tensor import DTensor


def digest_of(model: nn.Module) -> str:
    """Hashes all parameters and buffers, of which sharded ones are gathered."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
