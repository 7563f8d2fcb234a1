"""Lets this process use the processor's tile registers (AMX), which Linux gives to who asks.

In the path of vLLM's processes, so that Python runs it as they start: kernels of vLLM's CPU build
use tiles without asking, and die with SIGILL unless another library has happened to ask before.
"""

import ctypes
import platform

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

if platform.system() == "Linux" and platform.machine() == "x86_64":
    # Refused where there are none; then nobody uses them either.
    ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
