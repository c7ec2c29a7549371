"""Sets of arrays that live in NumPy or on a torch device."""

from __future__ import annotations

from dataclasses import fields


class Movable:
    """For frozen dataclasses whose fields are all arrays."""

    def on(self, device_name: str):
        """The same set where a chapter's `device` says: NumPy on the CPU, torch elsewhere."""
        if device_name == "cpu":
            return self
        from benign_attention.devices import resolve

        torch_device = resolve(device_name)
        return self if torch_device.type == "cpu" else self.to(torch_device)

    def to(self, torch_device):
        """The same set as torch tensors, in float64 where the device has it."""
        import torch

        dtype = torch.float32 if torch.device(torch_device).type == "mps" else torch.float64
        arrays = (getattr(self, f.name) for f in fields(self))
        return type(self)(*(torch.as_tensor(x, dtype=dtype, device=torch_device) for x in arrays))
