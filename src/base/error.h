// error.h: how anything in kvloom says that it failed.  Part: the words of every refusal.  Values only.
// Nothing throws across our interfaces: what can fail returns Expected<T>. Bad input and bad peers are errors; our own broken
// invariants are assertions. `scope` says what has to be rebuilt, so that one failed peer never costs another's transfers.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <tl/expected.hpp>
#include <utility>

namespace kvloom {

enum class Code : std::uint8_t {
  invalid_argument,  // a value that can never be right
  parse,             // text or bytes that do not follow their grammar
  unsupported,       // well formed, but this cannot be done; the message says why and what can
  out_of_range,      // an index or length outside of what it indexes
  overflow,          // a product or sum that does not fit 64 bits
  exhausted,         // memory, descriptors or a capacity
  unavailable,       // the peer or resource is gone
  deadline,          // not done within the time given
  cancelled,         // ended by the caller
  io,                // the operating system refused
};

enum class Scope : std::uint8_t {
  operation,  // only this call failed; everything else stands
  transfer,   // this transfer is over; the peer is fine
  peer,       // the connection to this peer has to be made again
  process,    // this process cannot go on
};

struct Error {
  Code code = Code::invalid_argument;
  Scope scope = Scope::operation;
  std::string message;  // one sentence with the offending values, and what to do where that can be known

  friend bool operator==(const Error&, const Error&) = default;
};

const char* to_string(Code code);
const char* to_string(Scope scope);

// "parse (operation): page=0 is not ..."
std::string to_string(const Error& error);

template <class T>
using Expected = tl::expected<T, Error>;

// Makes the failing half of an Expected.  return fail(Code::parse, "page={} is not positive", page);
template <class... Args>
tl::unexpected<Error> fail(Code code, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected<Error>(Error{code, Scope::operation, fmt::format(format, std::forward<Args>(args)...)});
}

template <class... Args>
tl::unexpected<Error> fail(Scope scope, Code code, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected<Error>(Error{code, scope, fmt::format(format, std::forward<Args>(args)...)});
}

}  // namespace kvloom
