#define KVTIER_ISA portable
#include "simd_portable.h"

#include "kernel.h"

const Kernel* portable_kernel() { return portable::kernel("portable"); }
