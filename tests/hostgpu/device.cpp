// A device of torch's PrivateUse1 type in host memory, as strict as a GPU: see __init__.py.
//
// Kernels are the CPU's on the same memory. What is refused: tensors of host and device in one operation, and within
// `refuse_waiting` whatever the host would wait for. Copies between pinned memory and the device are late: on a side
// stream they happen when somebody waits for the stream, and until then their target holds garbage.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using Sizes = c10::IntArrayRef;
using SymSizes = c10::SymIntArrayRef;

constexpr auto kDevice = DeviceType::PrivateUse1;
constexpr int kNumDevices = 8, kGarbage = 0xAB;
const std::set<std::string> kReadByHost = {
    "aten::_unique2", "aten::equal", "aten::masked_select", "aten::nonzero", "aten::repeat_interleave"};

bool refuses_waiting = false;

// -- Memory ----------------------------------------------------------------------------------------------------------

std::recursive_mutex memory_lock;  // is held by threads that have the GIL: nothing that may need it runs inside
std::map<const char*, size_t> pinned, owned;  // first byte and size
size_t allocated = 0, peak = 0;

void count(size_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(memory_lock);
  peak = std::max(peak, allocated += bytes);
}

void* aligned(size_t size) {
  void* memory = nullptr;
  TORCH_CHECK(size == 0 || posix_memalign(&memory, 64, size) == 0, "no memory");
  return memory;
}

void free_device(void* memory) {
  std::lock_guard<std::recursive_mutex> guard(memory_lock);
  if (auto found = owned.find(static_cast<char*>(memory)); found != owned.end()) {
    allocated -= found->second;
    owned.erase(found);
  }
  std::free(memory);
}

void free_pinned(void* memory) {
  std::lock_guard<std::recursive_mutex> guard(memory_lock);
  pinned.erase(static_cast<char*>(memory));
  std::free(memory);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = aligned(size);
    if (size) {
      std::memset(memory, kGarbage, size);
      std::lock_guard<std::recursive_mutex> guard(memory_lock);
      owned[static_cast<char*>(memory)] = size;
      count(size);
    }
    return {memory, memory, &free_device, Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = aligned(size);
    std::lock_guard<std::recursive_mutex> guard(memory_lock);
    if (size) pinned[static_cast<char*>(memory)] = size;
    return {memory, memory, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

bool is_pinned(const void* at) {
  std::lock_guard<std::recursive_mutex> guard(memory_lock);
  auto found = pinned.upper_bound(static_cast<const char*>(at));
  if (found == pinned.begin()) return false;
  --found;
  return static_cast<const char*>(at) < found->first + found->second;
}

// -- What torch asks of a device -------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return Device(kDevice, 0); }
  Device getDevice() const override { return Device(kDevice, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(Device) const override { return stream(); }
  c10::Stream getNewStream(Device, int = 0) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream own) const noexcept override { return own; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, Device(kDevice, 0)); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(1); }
  Device getDeviceFromPtr(void*) const override { return Device(kDevice, 0); }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto memory = device_allocator.allocate(size);
    auto* own = storage.unsafeGetStorageImpl();
    if (own->data()) std::memcpy(memory.get(), own->data(), std::min(size, own->nbytes()));
    own->set_data_ptr_noswap(std::move(memory));
    own->set_nbytes(size);
  }
};
Hooks hooks;
const bool is_registered = [] {
  c10::SetAllocator(kDevice, &device_allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// -- Host and device tensors of one memory ---------------------------------------------------------------------------

Tensor host(const Tensor& own) {
  if (!own.defined() || !own.is_privateuseone()) return own;
  auto storage = own.storage();
  at::AutoDispatchBelowADInplaceOrView guard;
  auto* first = static_cast<char*>(storage.mutable_data()) + own.storage_offset() * own.itemsize();
  auto options = own.options().device(DeviceType::CPU).requires_grad(false);
  return at::from_blob(first, own.sizes(), own.strides(), [storage](void*) {}, options);
}

Tensor device(const Tensor& own) {
  if (!own.defined()) return own;
  auto storage = own.storage();
  count(storage.nbytes());
  c10::DataPtr memory(
      storage.mutable_data(), new c10::Storage(storage),
      [](void* held) {
        std::unique_ptr<c10::Storage> storage(static_cast<c10::Storage*>(held));
        std::lock_guard<std::recursive_mutex> guard(memory_lock);
        allocated -= storage->nbytes();
      },
      Device(kDevice, 0));
  c10::Storage wrapped(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), &device_allocator, true);
  auto key = c10::DispatchKeySet{c10::DispatchKey::PrivateUse1};
  auto made = at::detail::make_tensor<at::TensorImpl>(std::move(wrapped), key, own.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(own.sizes(), own.strides(), own.storage_offset());
  return made;
}

// -- Streams: the copies that are still to be made -------------------------------------------------------------------

std::recursive_mutex streams_lock;
thread_local int current = 0;
std::map<int, std::vector<std::function<void()>>> queues;
std::map<int, long> num_done;
long num_late = 0;

/// Makes the copies of a stream, up to the one of that number; all of them if it is negative.
void flush(int stream, long upto) {
  std::vector<std::function<void()>> made;  // destroyed after the lock: a tensor that Python knows waits for the GIL
  std::lock_guard<std::recursive_mutex> guard(streams_lock);
  auto& queue = queues[stream];
  while (!queue.empty() && (upto < 0 || num_done[stream] < upto)) {
    made.push_back(std::move(queue.front()));
    queue.erase(queue.begin());
    num_done[stream]++;
    made.back()();
  }
}

long mark(int stream) {
  std::lock_guard<std::recursive_mutex> guard(streams_lock);
  return num_done[stream] + static_cast<long>(queues[stream].size());
}

bool is_pinned_host(const Tensor& own) { return own.is_cpu() && own.numel() && is_pinned(own.data_ptr()); }

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool is_late = non_blocking && from.numel() && (is_pinned_host(from) || is_pinned_host(to));
  TORCH_CHECK(
      !refuses_waiting || is_late || from.device() == to.device() || !from.numel(), "the host waits: a copy of ",
      from.numel(), " numbers from ", from.device(), " to ", to.device());
  if (!is_late || (current == 0 && is_pinned_host(from))) {  // to the device in order: its next kernel reads it
    flush(current, -1);
    host(to).copy_(host(from));
    return to;
  }
  std::lock_guard<std::recursive_mutex> guard(streams_lock);
  num_late++;
  Tensor source = from;
  if (current == 0) {  // from the device in order: its next kernel may write it
    source = host(from).clone();
    host(to).detach().fill_(7);
  }
  queues[current].push_back([source, to] {
    at::AutoDispatchBelowADInplaceOrView below;
    host(to).detach().copy_(host(source));
  });
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  host(to).copy_(host(from));
  return to;
}

at::Scalar local_scalar(const Tensor& own) {
  TORCH_CHECK(!refuses_waiting, "the host waits: a number is read");
  flush(current, -1);
  return host(own).item();
}

// -- Operations ------------------------------------------------------------------------------------------------------

/// Runs the CPU's kernel of an operation on the same memory.
void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.operator_name().name;
  const auto num_arguments = schema.arguments().size(), num_returns = schema.returns().size();
  const auto first = stack->size() - num_arguments;
  const std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  TORCH_CHECK(!refuses_waiting || !kReadByHost.count(name), "the host waits: ", name);
  bool to_host = false;
  auto checked = [&](const Tensor& own) {
    const bool is_foreign = own.defined() && own.is_cpu() && own.dim() > 0;
    TORCH_CHECK(!is_foreign, "Expected all tensors to be on the same device, and one of ", name, " is in host memory");
    return host(own);
  };
  for (size_t i = 0; i < num_arguments; i++) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      const auto own = value.toTensor();
      const bool is_made = schema.arguments()[i].is_out() && own.is_privateuseone();
      value = is_made ? at::empty({0}, own.options().device(DeviceType::CPU)) : checked(own);
    } else if (value.isTensorList()) {
      std::vector<Tensor> own;
      for (const Tensor& each : value.toTensorVector()) own.push_back(checked(each));
      value = own;
    } else if (value.isOptionalTensorList()) {  // indices may be in host memory
      c10::List<std::optional<Tensor>> own;
      for (const std::optional<Tensor>& each : value.toOptionalTensorList())
        own.push_back(each ? std::optional<Tensor>(host(*each)) : std::nullopt);
      value = own;
    } else if (value.isDevice()) {
      to_host = value.toDevice().type() != kDevice;
      value = Device(DeviceType::CPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = 0; i < num_returns; i++) {
    auto& value = (*stack)[stack->size() - num_returns + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (value.isTensor() && alias && alias->isWrite()) {  // an argument, which is returned itself
      for (size_t j = 0; j < num_arguments; j++) {
        const auto* own = schema.arguments()[j].alias_info();
        if (!own || !own->isWrite() || !given[j].isTensor() || own->beforeSets() != alias->beforeSets()) continue;
        const auto target = given[j].toTensor();
        if (schema.arguments()[j].is_out() && target.is_privateuseone()) copy_from_and_resize(value.toTensor(), target);
        value = given[j];
      }
    } else if (value.isTensor() && !to_host) {
      value = device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> own;
      for (const Tensor& each : value.toTensorVector()) own.push_back(device(each));
      value = own;
    }
  }
}

Tensor empty(
    Sizes sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  auto key = c10::DispatchKeySet{c10::DispatchKey::PrivateUse1};
  return at::detail::empty_generic(sizes, &device_allocator, key, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    Sizes sizes, Sizes strides, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device>,
    std::optional<bool>) {
  auto key = c10::DispatchKeySet{c10::DispatchKey::PrivateUse1};
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, key, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& own, SymSizes sizes, SymSizes strides, std::optional<c10::SymInt> offset) {
  auto first = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      own, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), first);
}

Tensor reshape_alias(const Tensor& own, SymSizes sizes, SymSizes strides) {
  return at::native::_reshape_alias(own, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor view(const Tensor& own, SymSizes sizes) { return at::native::view(own, C10_AS_INTARRAYREF_SLOW(sizes)); }

const Tensor& resize(const Tensor& own, SymSizes sym_sizes, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(sym_sizes);
  const size_t needed = (c10::multiply_integers(sizes) + own.storage_offset()) * own.itemsize();
  if (own.storage().nbytes() < needed) hooks.resizePrivateUse1Bytes(own.storage(), needed);
  own.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return own;
}

Tensor& set_part(Tensor& own, at::Storage storage, int64_t offset, Sizes sizes, Sizes strides) {
  own.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  own.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return own;
}

Tensor& set_tensor(Tensor& own, const Tensor& other) {
  return set_part(own, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

Tensor& set_storage(Tensor& own, at::Storage storage) {
  const int64_t size = storage.nbytes() / own.itemsize();
  return set_part(own, storage, 0, {size}, {1});
}

Tensor convolution(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, SymSizes stride, SymSizes padding,
    SymSizes dilation, bool transposed, SymSizes output_padding, c10::SymInt groups) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto own_bias = bias ? std::optional<Tensor>(host(*bias)) : std::nullopt;
  return device(at::convolution_symint(
      host(x), host(weight), own_bias, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& weight, SymSizes stride, SymSizes padding, SymSizes dilation,
    bool transposed, SymSizes output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  at::AutoDispatchBelowADInplaceOrView below;
  const std::vector<c10::SymInt> bias_sizes{weight.size(0)};
  auto [of_x, of_weight, of_bias] = at::convolution_backward_symint(
      host(gradient), host(x), host(weight), SymSizes(bias_sizes), stride, padding, dilation, transposed, output_padding,
      groups, wanted);
  return {device(of_x), device(of_weight), device(of_bias)};
}

int64_t attention_by_formula(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_by_formula)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;  // a copy that is made may need it
  m.def("flush", &flush, WithoutGil());
  m.def("mark", &mark, WithoutGil());
  m.def("set_stream", [](int stream) { return std::exchange(current, stream); });
  m.def("refuse_waiting", [](bool value) { refuses_waiting = value; });
  m.def("num_late", [] { return num_late; });
  m.def("allocated", [] { return allocated; });
  m.def("peak", [] { return peak; });
  m.def("reset_peak", [] { peak = allocated; });
  m.attr("num_devices") = kNumDevices;
}
