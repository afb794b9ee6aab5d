#define KVTIER_ISA avx512
#include "simd_avx512.h"

#include "kernel.h"

const Kernel* avx512_kernel() { return avx512::kernel("avx512"); }
