#define KVTIER_ISA avx512_bf16
#include "simd_avx512.h"

#include "kernel.h"

const Kernel* avx512_bf16_kernel() { return avx512_bf16::kernel("avx512_bf16"); }
