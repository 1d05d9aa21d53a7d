"""Decides, at the start of every Python process of the environment, whether the rig is visible at all.

The rig is asked for with SPECPLUG_RIG_SGLANG: `1`, or `triton` to verify trees with SGLang's Triton kernel
(needs TRITON_INTERPRET=1). Unset, nothing here has any effect. The module `sgl_kernel` and the entry point of
`sglang.srt.plugins` lie in the folder `visible/`, which `specplug_rig_sglang.pth` puts on sys.path through
`activate()`; spawned processes inherit the answer the same way.

Standard library only, and no import at all while the rig is off: this runs in every interpreter start.
"""

import os
import sys
from pathlib import Path

SWITCH = "SPECPLUG_RIG_SGLANG"
CHOICES = ("1", "triton")
VISIBLE = Path(__file__).parent / "visible"


def activate() -> None:
    """Make the rig's modules importable when they are wanted; idempotent."""
    asked = os.environ.get(SWITCH)
    if asked is None or str(VISIBLE) in sys.path:
        return
    if asked not in CHOICES:
        raise SystemExit(f"{SWITCH}={asked!r}: expected one of {', '.join(CHOICES)}, or unset")
    sys.path.append(str(VISIBLE))
    sys.meta_path.insert(0, BeforeTorchvision())


class BeforeTorchvision:
    """Lets torchvision, which SGLang imports, come up over the CPU build of torch.

    The wheel's compiled operators do not load there, and its Python part then fails over two missing names.
    They are defined, without a kernel, when torchvision is first looked for.
    """

    library = None  # the registration lives as long as this object

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            if torch.version.cuda is not None:
                return
            BeforeTorchvision.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
