// plan_measure.h: how long planning takes: for `kvloom bench`.  Stage: tools.
// One shape for all: GLM-5.2 in fp8 (latent 78 x 576 B, index_k on 21 layers, a draft layer of both).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvloom/base/error.h"

namespace kvloom {

// One line of the table of ratios.
struct BenchRow {
  std::string name;  // "compile 8 x 4"
  double value = 0;
  std::string unit;  // "us", "ns a page", "B", "of memcpy"
  double goal = 0;   // 0: none, shown beside the others
  bool at_most = true;
  std::string shape;  // what was measured
};

inline bool holds(const BenchRow& row) { return row.goal == 0 || (row.at_most ? row.value <= row.goal : row.value >= row.goal); }

double median(std::vector<double> values);  // of none: 0

// Medians of `repeats` rounds of each.
Expected<std::vector<BenchRow>> measure_planning(int repeats);

}  // namespace kvloom
