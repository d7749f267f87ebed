// copy_kernels.h: what copy.cc chooses from: the kernels of the processor that this is built for.  CMake picks the file
// (copy_x86.cc or copy_other.cc).
#pragma once

#include <vector>

#include "kvloom/transport/copy.h"

namespace kvloom {

// Those that this CPU can run, the fastest last; may be empty.
std::vector<CopyKernel> isa_copy_kernels();

// For loops that wait for another core.
void relax_cpu();

}  // namespace kvloom
