// bind.h: what the files of the extension share: refusals, seconds, the GIL.  Stage: python.
// The extension is the C++ interface in Python's words, one file for each folder of src/, and decides nothing. Values are copied; resources have
// one Python object each. Every call that may wait, copy or compile runs without the GIL, and nothing calls into Python from a thread of ours.
// Python has lengths and ids as int, durations and moments as float seconds (of CLOCK_MONOTONIC, which is time.monotonic()), absence as None.
#pragma once

#include <nanobind/nanobind.h>
// All casters that anybody here needs: one that a file forgets is found when it runs, not when it is compiled.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"
#include "kvloom/plan/plan.h"

namespace kvloom::python {

namespace nb = nanobind;
using namespace nb::literals;

// The only thing that we throw; base.cc turns it into one of kvloom.errors.
struct Refused {
  Error error;
};

template <class T>
T take(Expected<T> value) {
  if (!value) throw Refused{std::move(value.error())};
  if constexpr (!std::is_void_v<T>) return std::move(*value);
}

template <class... Args>
[[noreturn]] void refuse(Code code, fmt::format_string<Args...> format, Args&&... args) {
  throw Refused{{code, Scope::operation, fmt::format(format, std::forward<Args>(args)...)}};
}

// The GIL is free while this stands. Unlike nanobind's: once Python ends (`end_python`), a daemon's thread that wants it back sleeps for ever, as
// from Python 3.14 on all do. Before, Python ends such a thread by an unwinding that destructors do not let through: the process would abort.
// @pre the GIL
class FreeGil {
 public:
  FreeGil() : state_(PyEval_SaveThread()) {}
  FreeGil(const FreeGil&) = delete;
  FreeGil& operator=(const FreeGil&) = delete;
  ~FreeGil();

 private:
  PyThreadState* state_;
};
// Stands where our C++ calls functions of Python, in which the GIL may go to another thread; for the same reason.  @pre the GIL
class InPython {
 public:
  InPython();
  InPython(const InPython&) = delete;
  InPython& operator=(const InPython&) = delete;
  ~InPython();
};
// From now on only the calling thread comes out of a FreeGil, or into Python; those that are on their way are waited for.  @pre the GIL
void end_python();

// For functions whose arguments and results are C++ values by then: they run beside Python's threads.
using WithoutGil = nb::call_guard<FreeGil>;

// An exception that is told, not raised.  @pre the GIL
nb::object exception_of(const Error& error);

// @error invalid_argument: negative, or not a number.  Infinity: as long as can be
std::chrono::nanoseconds to_duration(double seconds);
inline double to_seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

template <class Id>
auto numbers(const std::vector<Id>& ids) {
  std::vector<decltype(Id::value)> out;
  out.reserve(ids.size());
  for (const Id id : ids) out.push_back(id.value);
  return out;
}
template <class Id>
std::vector<Id> ids_of(const std::vector<decltype(Id::value)>& numbers) {
  std::vector<Id> out;
  out.reserve(numbers.size());
  for (const auto number : numbers) out.emplace_back(number);
  return out;
}

// Tokens [begin, end) of a request, as Python says them: None is all of them.
using RangeWords = std::optional<std::pair<std::int64_t, std::optional<std::int64_t>>>;
// @error invalid_argument: negative, the end before the begin, or beyond any request's length
TokenRange to_range(const RangeWords& words);
// The same, where a sum over it is wanted.  @error invalid_argument: no end
TokenRange to_bounded_range(const RangeWords& words);
// @error invalid_argument: negative, or more tokens than a request may have
void check_tokens(std::int64_t tokens, const char* what);
inline std::optional<std::int64_t> bounded(std::int64_t value) {
  return value == kUnbounded ? std::nullopt : std::optional(value);
}

// Page ids [columns]: a sequence of int, or one-dimensional int64 in host memory (DLPack or the buffer protocol).  @pre the GIL
std::vector<PageId> to_pages(nb::handle pages);

// Plan's documents and picture: tools.cc.
void add_documents(nb::class_<Plan>& plan);

// The names of a module, each by its own file.
void bind_base(nb::module_& m);
void bind_geometry(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_bind(nb::module_& m);
void bind_landing(nb::module_& m);
void bind_transport(nb::module_& m);
void bind_session_values(nb::module_& m);
void bind_session(nb::module_& m);
void bind_tools(nb::module_& m);

}  // namespace kvloom::python
