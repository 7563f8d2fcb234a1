"""Ask Linux for the processor's tile registers (AMX), which it gives only to processes that ask.

This file is in the path of vLLM's processes, so that Python runs it when they start. Kernels of
vLLM's CPU build use tiles without asking. They die with SIGILL unless another library has happened
to ask before.
"""

import ctypes
import platform

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

if platform.system() == "Linux" and platform.machine() == "x86_64":
    # Linux refuses on processors without tiles; then no kernel uses them either.
    ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
