// base.cc: codes and scopes of errors, and the one place where an error becomes a Python exception.  Stage: python.
#include <nanobind/ndarray.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "kvloom/session/message.h"
#include "python/bind/bind.h"

namespace kvloom::python {
namespace {

std::atomic<bool> python_ends = false;
std::thread::id ending;           // who ends it; written before python_ends
std::atomic<int> on_its_way = 0;  // threads under frames of ours that want the GIL, or may lose it

bool has_ended() { return python_ends && std::this_thread::get_id() != ending; }

}  // namespace

FreeGil::~FreeGil() {
  ++on_its_way;
  if (has_ended()) {
    --on_its_way;
    for (;;) pause();
  }
  PyEval_RestoreThread(state_);
  --on_its_way;
}

InPython::InPython() {
  if (has_ended()) const FreeGil for_ever;
  ++on_its_way;
}
InPython::~InPython() { --on_its_way; }

void end_python() {
  ending = std::this_thread::get_id();
  python_ends = true;
  const FreeGil free;
  while (on_its_way > 0) std::this_thread::yield();
}

nb::object exception_of(const Error& error) {
  const InPython here;
  return nb::module_::import_("kvloom.errors").attr("make")(error.message, error.code, error.scope);
}

std::chrono::nanoseconds to_duration(double seconds) {
  if (!(seconds >= 0)) refuse(Code::invalid_argument, "a time of {} s: wanted seconds, 0 or more", seconds);
  constexpr double kMost = 9e9;  // s; 2^63 ns are 9.2e9
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, kMost) * 1e9));
}

void check_tokens(std::int64_t tokens, const char* what) {
  if (tokens < 0 || tokens > kMaxRequestTokens) refuse(Code::invalid_argument, "{}={} tokens: wanted 0 to 2^48", what, tokens);
}

TokenRange to_bounded_range(const RangeWords& words) {
  const TokenRange range = to_range(words);
  if (range.end == kUnbounded)
    refuse(Code::invalid_argument, "a range from {} without an end: say how many tokens the request has", range.begin);
  return range;
}

TokenRange to_range(const RangeWords& words) {
  if (!words) return {};
  if (words->second) check_tokens(*words->second, "end");
  const TokenRange range{words->first, words->second.value_or(kUnbounded)};
  if (range.begin < 0 || range.end < range.begin)
    refuse(Code::invalid_argument, "a token range of ({}, {}): wanted (begin, end) with 0 <= begin <= end, end None for no end",
           range.begin, range.end);
  return range;
}

std::vector<PageId> to_pages(nb::handle pages) {
  nb::ndarray<const std::int64_t, nb::ndim<1>, nb::device::cpu> array;
  if (nb::try_cast(pages, array, false)) {
    std::vector<PageId> out;
    out.reserve(array.shape(0));
    for (std::size_t i = 0; i < array.shape(0); ++i)
      out.emplace_back(array.data()[static_cast<std::ptrdiff_t>(i) * array.stride(0)]);
    return out;
  }
  std::vector<std::int64_t> numbers;
  if (nb::try_cast(pages, numbers)) return ids_of<PageId>(numbers);
  throw nb::type_error("pages: wanted a sequence of int, or a one-dimensional int64 array in host memory");
}

namespace {

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Refused& refused) {
    const nb::object exception = exception_of(refused.error);
    PyErr_SetObject(exception.type().ptr(), exception.ptr());
  }
}

}  // namespace

void bind_base(nb::module_& m) {
  pthread_atfork(nullptr, nullptr, [] { on_its_way = 0; });  // those threads are not in the child
  nb::enum_<Code>(m, "Code", "What kind of failure an error is; each has an exception class of its own (kvloom.errors).")
      .value("invalid_argument", Code::invalid_argument, "a value that can never be right")
      .value("parse", Code::parse, "text or bytes that do not follow their grammar")
      .value("unsupported", Code::unsupported, "well formed, but this cannot be done; the message says why and what can")
      .value("out_of_range", Code::out_of_range, "an index or length outside of what it indexes")
      .value("overflow", Code::overflow, "a product or sum that does not fit 64 bits")
      .value("exhausted", Code::exhausted, "memory, descriptors or a capacity")
      .value("unavailable", Code::unavailable, "the peer or resource is gone")
      .value("deadline", Code::deadline, "not done within the time given")
      .value("cancelled", Code::cancelled, "ended by the caller")
      .value("io", Code::io, "the operating system refused");
  nb::enum_<Scope>(m, "Scope", "What has to be rebuilt after an error.")
      .value("operation", Scope::operation, "only this call failed; everything else stands")
      .value("transfer", Scope::transfer, "this transfer is over; the peer is fine")
      .value("peer", Scope::peer, "the connection to this peer has to be made again")
      .value("process", Scope::process, "this process cannot go on");
  nb::register_exception_translator(translate);
}

}  // namespace kvloom::python
