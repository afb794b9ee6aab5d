#define KVTIER_ISA neon
#include "simd_neon.h"

#include "kernel.h"

const Kernel* neon_kernel() { return neon::kernel("neon"); }
