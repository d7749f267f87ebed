// copy_kernel.h: the copy kernel as the build embeds it: copy_kernel.cu, compiled (cmake/kvloom_cuda.cmake).  Stage: carry.
#pragma once

extern const unsigned char kvloom_copy_kernel_fatbin[];  // for cuModuleLoadData; the name that kvloom_cuda gives it

namespace kvloom::cuda {

inline const void* copy_kernel_image() { return kvloom_copy_kernel_fatbin; }

}  // namespace kvloom::cuda
