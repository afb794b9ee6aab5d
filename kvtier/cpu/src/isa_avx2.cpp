#define KVTIER_ISA avx2
#include "simd_avx2.h"

#include "kernel.h"

const Kernel* avx2_kernel() { return avx2::kernel("avx2"); }
