// cuda_blas.h: cuBLAS as a table of the few functions that a load needs.  Stage: tools.  libcublas is looked up when somebody asks for a load,
// so nothing of it is linked and no header of it is needed: it is no part of a driver, and most machines that run kvloom have none.
// Law: each member has the signature of the exported symbol (`symbol` below); types that only pass through are `void*`, enums are `int`,
// as the C ABI has them.  Owner: whoever calls load; a table never changes.  Thread: any; a handle belongs to one.
// Source: the cuBLAS library reference, "cublasGemmEx", "cublasGemmStridedBatchedEx" and the types beside them; cublas_api.h and
// library_types.h of CUDA 13.0. The same since CUDA 11, where cublasComputeType_t came.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>

#include "kvloom/base/error.h"

namespace kvloom {

using BlasHandle = void*;
using BlasStatus = int;  // 0: CUBLAS_STATUS_SUCCESS

inline constexpr int kBlasNotTransposed = 0, kBlasTransposed = 1;  // cublasOperation_t
inline constexpr int kBlasBf16 = 14;                               // cudaDataType: CUDA_R_16BF
inline constexpr int kBlasComputeFloat = 68;                       // cublasComputeType_t: CUBLAS_COMPUTE_32F
inline constexpr int kBlasDefault = -1;                            // cublasGemmAlgo_t: CUBLAS_GEMM_DEFAULT

struct Blas {
  BlasStatus (*create)(BlasHandle*) = nullptr;
  BlasStatus (*destroy)(BlasHandle) = nullptr;
  BlasStatus (*set_stream)(BlasHandle, CUstream) = nullptr;
  BlasStatus (*set_workspace)(BlasHandle, void*, std::size_t) = nullptr;
  const char* (*status_text)(BlasStatus) = nullptr;
  // transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB, beta, C, Ctype, ldc, strideC, batchCount, computeType, algo
  BlasStatus (*gemm_strided_batched)(BlasHandle, int, int, int, int, int, const void*, const void*, int, int, long long,
                                     const void*, int, int, long long, const void*, void*, int, int, long long, int, int,
                                     int) = nullptr;
  // transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc, computeType, algo
  BlasStatus (*gemm)(BlasHandle, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*,
                     void*, int, int, int, int) = nullptr;
  // Of the driver: milliseconds from an event to a later one. Here, because cuda.h of 12.8 and newer maps it to a name that older
  // drivers have not; this is the one that all have.
  CUresult (*elapsed)(float*, CUevent, CUevent) = nullptr;

  // `path`: a library or the folder of one; empty: as the loader finds it, CUDA 13's before 12's.
  // @error unsupported: there is none, with what to install or to pass
  // Owners: every load that was made with it.
  static Expected<std::shared_ptr<const Blas>> load(const std::string& path);
};

}  // namespace kvloom
