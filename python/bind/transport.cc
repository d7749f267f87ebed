// transport.cc: carry: transports, memory that is lent to them, a device's work.  Stage: python.  carrier.h has the law.

#include <algorithm>
#include <cstdlib>

#include "kvloom/transport/shm/shm.h"
#include "python/bind/carrier.h"

namespace kvloom::python {
namespace {

using Memory = nb::ndarray<>;  // of any framework, anywhere
using SharedLent = std::shared_ptr<Lent>;

std::shared_ptr<Carrier> open_shm(const std::string& listen, int copy_threads) {
  ShmOptions options;
  options.listen = listen;
  options.copy_threads = copy_threads;
  return std::make_shared<Carrier>(take(ShmTransport::make(std::move(options))));
}

SharedLent allocate(const std::shared_ptr<Carrier>& carrier, std::int64_t length) {
  if (length <= 0) refuse(Code::invalid_argument, "an allocation of {} B: wanted 1 or more", length);
  Region region = [&] {
    const FreeGil free;
    return take(carrier->use([&](Transport& transport) { return transport.allocate(Bytes(length)); }));
  }();
  return std::make_shared<Lent>(carrier, std::move(region), true, carrier->device());
}

SharedLent lend(const std::shared_ptr<Carrier>& carrier, std::byte* base, std::int64_t length, std::optional<int> gpu) {
  if (base == nullptr || length <= 0)
    refuse(Code::invalid_argument, "memory of {} B to lend: wanted an address and 1 or more", length);
  if (reinterpret_cast<std::uintptr_t>(base) > UINTPTR_MAX - static_cast<std::uintptr_t>(length))
    refuse(Code::out_of_range, "memory of {} B at {:#x} to lend: it would end beyond the last address", length,
           reinterpret_cast<std::uintptr_t>(base));
  Region region = [&] {
    const FreeGil free;
    const std::span memory(base, static_cast<std::size_t>(length));
    return take(carrier->use([&](Transport& transport) { return transport.register_memory(memory); }));
  }();
  return std::make_shared<Lent>(carrier, std::move(region), false, gpu);
}

// @error invalid_argument: memory that this transport does not reach
std::optional<int> gpu_of(const Carrier& carrier, const Memory& memory) {
  const int type = memory.device_type();
  if (type == nb::device::cpu::value || type == nb::device::cuda_host::value) return std::nullopt;
  if (type != nb::device::cuda::value && type != nb::device::cuda_managed::value)
    refuse(Code::invalid_argument, "memory of a device of DLPack's type {}: wanted host memory or CUDA's", type);
  if (carrier.abilities().name != "cuda")
    refuse(Code::invalid_argument, "memory of GPU {} for the transport {}: make one with kvloom.cuda_transport",
           memory.device_id(), carrier.abilities().name);
  return memory.device_id();
}

// From the first byte that any element has to the last one.
SharedLent register_memory(const std::shared_ptr<Carrier>& carrier, Memory memory) {
  const auto item = static_cast<std::int64_t>(memory.itemsize());
  std::int64_t first = 0, last = 0;  // elements
  for (std::size_t d = 0; d < memory.ndim(); ++d) {
    const std::int64_t reach = (static_cast<std::int64_t>(memory.shape(d)) - 1) * memory.stride(d);
    (reach < 0 ? first : last) += reach;
  }
  const std::int64_t length = memory.size() == 0 ? 0 : (last - first + 1) * item;
  const std::optional<int> gpu = gpu_of(*carrier, memory);
  SharedLent lent = lend(carrier, static_cast<std::byte*>(memory.data()) + first * item, length, gpu);
  lent->memory = std::move(memory);
  return lent;
}

SharedLent register_pointer(const std::shared_ptr<Carrier>& carrier, std::uintptr_t address, std::int64_t length,
                            nb::object owner) {
  SharedLent lent = lend(carrier, reinterpret_cast<std::byte*>(address), length, gpu_at(*carrier, address));
  lent->owner = std::move(owner);
  return lent;
}

// uint8 [length], where the region is; keeps it.
nb::ndarray<nb::array_api, std::uint8_t> array_of(nb::pointer_and_handle<Lent> lent) {
  const std::size_t shape[1] = {static_cast<std::size_t>(lent.p->region.length().value)};
  const int type = lent.p->gpu ? nb::device::cuda::value : nb::device::cpu::value;
  return {lent.p->region.base(), 1, shape, lent.h, nullptr, nb::dtype<std::uint8_t>(), type, lent.p->gpu.value_or(0)};
}

void bind_carrier(nb::module_& m) {
  nb::class_<Carrier>(
      m, "Transport",
      "What carries bytes between processes: shm_transport() in host memory, cuda_transport() in a GPU's. One session each.")
      .def_prop_ro(
          "name", [](const Carrier& carrier) { return std::string(carrier.abilities().name); }, "shm or cuda.")
      .def_prop_ro("address", &Carrier::address, "What a peer connects to; empty where nobody can.")
      .def_prop_ro(
          "source_must_be_allocated", [](const Carrier& carrier) { return carrier.abilities().source_must_be_allocated; },
          "A prefill rank's cache has to lie in memory of allocate(); a decode rank's may lie anywhere.")
      .def_prop_ro(
          "can_revoke", [](const Carrier& carrier) { return carrier.abilities().can_revoke; },
          "A transfer that fails gives its pages back at once; else they wait in quarantine for its peers.")
      .def_prop_ro("device", &Carrier::device, "Ordinal of the GPU whose memory allocate() gives; None: host memory.")
      .def("allocate", allocate, "length"_a,
           "Memory of `length` bytes that peers reach fastest, zeroed, as a Region: host memory that other processes may map "
           "(shm), or the GPU's "
           "(cuda). Raises Exhausted, InvalidArgument.")
      .def("register_memory", register_memory, "memory"_a,
           nb::sig("def register_memory(self, memory: kvloom.typing.Memory) -> Region"),
           "Lends memory of the caller: anything writable with DLPack (torch tensors, on the GPU too) or the buffer protocol, of "
           "any shape and "
           "strides; the region is from its first byte to its last. The Region keeps it.\n\nRaises InvalidArgument: memory of "
           "another device; "
           "Unsupported: peers can't read it, and which setting of its allocator helps; Exhausted: can't be pinned.")
      .def("register_pointer", register_pointer, "address"_a, "length"_a, "owner"_a = nb::none(),
           "Lends `length` bytes from `address`, host memory or this transport's GPU's. `owner`: kept as long as the Region. "
           "Raises as "
           "register_memory, and OutOfRange: beyond the last address; the memory must stand as long as the Region.")
      .def(
          "record", [](const Carrier& carrier, std::uintptr_t stream) { return Work{record_work(carrier, stream)}; }, "stream"_a,
          WithoutGil(),
          "All that was put on a CUDA stream so far, for SourceSession.ready(after=...). `stream`: the cudaStream_t as int "
          "(torch.cuda.current_stream().cuda_stream). Costs a few microseconds, waits for nothing. Raises Unsupported, IoError.")
      .def(
          "gate", [](const Carrier& carrier) { return Gate{make_gate(carrier)}; }, WithoutGil(),
          "A gate at which a CUDA stream waits for layers of one transfer: TargetSession.begin(gate=...). Raises Unsupported, "
          "Exhausted.");
}

// An owner that holds its region is no leak: the garbage collector sees through.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<Lent>(self)->owner.ptr());
  return 0;
}
int clear(PyObject* self) {
  Lent& lent = *nb::inst_ptr<Lent>(self);
  if (!lent.carrier->is_forked()) lent.take_back();  // before its memory goes
  nb::object(std::move(lent.owner)).reset();
  return 0;
}
PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};

void bind_region(nb::module_& m) {
  nb::class_<Lent>(
      m, "Region", nb::type_slots(slots),
      "Memory lent to a transport, for as long as this, an array over it or a session whose cache lies in it stands.")
      .def_prop_ro(
          "base", [](const Lent& lent) { return reinterpret_cast<std::uintptr_t>(lent.region.base()); }, "Its address.")
      .def_prop_ro(
          "length", [](const Lent& lent) { return lent.region.length().value; }, "Bytes.")
      .def_prop_ro(
          "allocated", [](const Lent& lent) { return lent.allocated; }, "By the transport, not the caller.")
      .def("array", array_of, nb::sig("def array(self) -> kvloom.typing.Array"),
           "The memory as uint8 [length], where it lies (DLPack, in host memory the buffer protocol): "
           "torch.from_dlpack(region.array()), "
           "numpy.asarray(region.array()), memoryview(region.array()). It keeps the region.")
      .def(
          "__dlpack__",
          [](nb::handle_t<Lent> self, const nb::kwargs& words) { return self.attr("array")().attr("__dlpack__")(**words); },
          nb::sig("def __dlpack__(self, **kwargs: typing.Any) -> typing.Any"), "So that torch.from_dlpack(region) works.")
      .def(
          "__dlpack_device__", [](const Lent& lent) { return std::pair(lent.gpu ? 2 : 1, lent.gpu.value_or(0)); },
          "As DLPack has it: (1, 0) is host memory, (2, n) is GPU n.")
      .def("__len__", [](const Lent& lent) { return lent.region.length().value; })
      .def("__repr__", [](const Lent& lent) {
        return fmt::format("<Region of {} B, {} {}>", lent.region.length().value, lent.allocated ? "allocated by" : "lent to",
                           lent.carrier->abilities().name);
      });
}

}  // namespace

void bind_transport(nb::module_& m) {
  bind_carrier(m);
  bind_region(m);
  nb::class_<Work>(m, "DeviceWork", "Work that was put on a device, and is done at some time: Transport.record().")
      .def(
          "is_done", [](const Work& work) { return take(work.work->is_done()); }, WithoutGil(),
          "Never waits. Raises IoError: it will never be done.");
  nb::class_<Gate>(
      m, "Gate",
      "Where a device's stream waits for layers of one transfer: Transport.gate(). Keep it until no stream waits there.")
      .def(
          "wait",
          [](const Gate& gate, std::uintptr_t stream, std::int32_t layer) { wait_at(*gate.gate, stream, LayerId(layer)); },
          "stream"_a, "layer"_a, WithoutGil(),
          "What is put on `stream` (a cudaStream_t as int) from now on begins once the layer has landed, or the transfer has "
          "ended: ask which, "
          "before you believe what was read. Raises IoError; Exhausted: much memory of lost peers waits for gates: wait_layer() "
          "then.");
  m.def("shm_transport", open_shm, "listen"_a = "", "copy_threads"_a = 1, WithoutGil(),
        "The transport between processes of one user on one host, in host memory.\n\n`listen`: a decode rank says \"*\" (a free "
        "name) or a name; "
        "a prefill rank nothing. `copy_threads`: that copy what arrives, the session's among them. Raises InvalidArgument, "
        "Unavailable: the name "
        "is taken, Exhausted.");
  m.def("cuda_transport", open_cuda, "listen"_a = "", "device"_a = 0, "allocate_on_host"_a = false, WithoutGil(),
        "The transport between processes of one host whose caches are in GPU memory, on GPU `device` (as CUDA_VISIBLE_DEVICES "
        "leaves them).\n\n"
        "`listen`: as shm_transport. `allocate_on_host`: allocate() gives pinned host memory. Raises Unsupported: built without "
        "CUDA, no driver, "
        "no such GPU; InvalidArgument, Unavailable, Exhausted.");
}

}  // namespace kvloom::python
