// documents.h: what `describe --json` and `plan --json` print, for who asks in the same process (Python).  Stage: tools.  Values only.
#pragma once

#include <cstdint>
#include <string>

#include "kvloom/base/error.h"
#include "kvloom/plan/plan.h"
#include "kvloom/tools/job.h"

namespace kvloom {

// `memory`: of each rank's cache, bytes; 0: no capacity.  @error invalid_argument: a rule that cuts the length, and no tokens
Expected<std::string> describe_document(const Job& job, std::int64_t memory);

// The plan was compiled of the job's sides and total. Without compile_ns.  `tables`: the words of --tables; read where the job has tokens
// @error as make_tables, bind
Expected<std::string> plan_document(const Job& job, const Plan& plan, const std::string& tables);

}  // namespace kvloom
