// An emulated accelerator: PyTorch's PrivateUse1 device with the host's memory and the CPU's kernels.
//
// To PyTorch it is a device of its own, with an allocator, generators, pinned memory, threads of autograd and lists of
// autocast. What CUDA refuses is refused: tensors of two devices in one operation, a generator of another device.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;

constexpr auto kEmulated = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kAlignment = 64;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ---- What tests set and read ----

std::atomic<bool> refuses_float64{false};     // as MPS does
std::atomic<bool> defers_copies{false};       // copies to the host that do not block arrive when it synchronizes
std::array<std::atomic<int64_t>, kDevices> live_bytes{}, peak_bytes{};  // of the memory of each device

std::mutex counts_mutex;
std::map<std::string, int64_t> counts;  // "launch", "wait" or "upload", and of what

void count(const std::string& what) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  counts[what]++;
}

void take(DeviceIndex index, int64_t size) {
  int64_t now = live_bytes.at(index) += size, peak = peak_bytes.at(index);
  while (peak < now && !peak_bytes.at(index).compare_exchange_weak(peak, now)) {
  }
}

// ---- Devices ----

thread_local DeviceIndex current_device = 0;

void set_device(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "invalid device ordinal ", int(index));
  current_device = index;
}

Device with_index(Device device) { return device.has_index() ? device : Device(kEmulated, current_device); }

void check_dtype(at::ScalarType dtype) {
  if (refuses_float64 && (dtype == at::kDouble || dtype == at::kComplexDouble)) {
    throw c10::TypeError({__func__, __FILE__, __LINE__}, "The emulated device does not support float64.");
  }
}

// ---- Memory ----

void* allocated(size_t size) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, kAlignment, std::max(size, kAlignment)) == 0, "out of memory");
  return memory;
}

struct Block {
  void* memory;
  size_t size;
  DeviceIndex device;
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    take(current_device, size);
    auto* block = new Block{allocated(size), size, current_device};
    return {block->memory, block, &release, Device(kEmulated, current_device)};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    live_bytes.at(block->device) -= block->size;
    free(block->memory);
    delete block;
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kEmulated, &device_allocator);

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;  // start and size

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = allocated(size);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<char*>(memory)] = size;
    return {memory, memory, &release, Device(c10::kCPU)};
  }
  static void release(void* memory) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(static_cast<char*>(memory));
    free(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* pointer) {
  auto* place = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(place);
  if (after == pinned.begin()) return false;
  auto [start, size] = *std::prev(after);
  return place == start || place < start + size;
}

// ---- Copies that arrive later ----

std::mutex pending_mutex;
std::vector<std::pair<Tensor, Tensor>> pending;  // to and from, both on the host

void defer(const Tensor& to, const Tensor& from) {
  memset(to.data_ptr(), 0xFF, to.nbytes());  // NaN in every format: nothing has arrived yet
  std::lock_guard<std::mutex> lock(pending_mutex);
  pending.emplace_back(to, from.clone());
}

void synchronize() {
  count("wait synchronize");
  std::vector<std::pair<Tensor, Tensor>> arrived;
  {
    std::lock_guard<std::mutex> lock(pending_mutex);
    arrived.swap(pending);
  }
  for (auto& [to, from] : arrived) to.copy_(from);
}

// ---- The guard: each device has one stream ----

using Moment = std::chrono::steady_clock::time_point;  // what an event is: the CPU has done what was asked before

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kEmulated; }
  Device getDevice() const override { return Device(kEmulated, current_device); }
  void setDevice(Device device) const override {
    if (device.has_index()) set_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(device));
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeDevice(DeviceIndex) const override { synchronize(); }
  void record(void** event, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment;
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Moment*>(end) - *static_cast<Moment*>(begin)).count();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { synchronize(); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- Random numbers: a generator of the CPU that belongs to a device ----

struct Generator final : c10::GeneratorImpl {
  at::Generator inner;

  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(kEmulated, index < 0 ? current_device : index), kKeys),
        inner(at::detail::createCPUGenerator()) {}
  static Generator& of(const at::Generator& generator) {
    return *static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static const std::array<at::Generator, kDevices> generators{
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return generators.at(index < 0 ? current_device : index);
}

// Lends the device's random numbers to a kernel that draws from the default generator and takes no other.
struct Lent {
  at::Generator host = at::detail::getDefaultCPUGenerator(), ours;
  Tensor kept = host.get_state();
  explicit Lent(Device device) : ours(Generator::of(default_generator(device.index())).inner) {
    host.set_state(ours.get_state());
  }
  ~Lent() {
    ours.set_state(host.get_state());
    host.set_state(kept);
  }
};

// ---- What PyTorch asks of a backend ----

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { set_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current_device, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  Device getDeviceFromPtr(void*) const override { return Device(kEmulated, current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = device_allocator.allocate(size);
    if (storage.nbytes()) memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(size);
  }
};

// ---- A tensor of the device as one of the CPU on the same memory, and back ----

Tensor tensor_of(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kEmulated; }

Tensor on_host(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  auto memory = c10::DataPtr(tensor.storage().mutable_data(), Device(c10::kCPU));
  auto size = c10::Storage::use_byte_size_t{};
  c10::Storage storage(size, tensor.storage().nbytes(), std::move(memory), c10::GetCPUAllocator(), true);
  auto alias = tensor_of(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// The memory of a tensor of the CPU, which lives on as memory of the device.
c10::DataPtr adopted(const Tensor& made, Device device) {
  struct Adopted {
    Tensor tensor;
    DeviceIndex device;
  };
  take(device.index(), made.storage().nbytes());
  auto release = [](void* context) {
    auto* adopted = static_cast<Adopted*>(context);
    live_bytes.at(adopted->device) -= adopted->tensor.storage().nbytes();
    delete adopted;
  };
  return {made.storage().mutable_data(), new Adopted{made, device.index()}, release, device};
}

c10::Storage adopted_storage(const Tensor& made, Device device) {
  auto size = c10::Storage::use_byte_size_t{};
  return c10::Storage(size, made.storage().nbytes(), adopted(made, device), &device_allocator, true);
}

Tensor on_device(const Tensor& made, Device device) {
  return made.defined() ? tensor_of(adopted_storage(made, device), kKeys, made) : made;
}

// ---- Most operations: checked, then run by the CPU's kernel ----

template <typename Function>
IValue map_tensors(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// Returns the one device of an operation. As on CUDA, numbers (tensors without dimensions) and indices may be the CPU's.
Device device_of(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  std::optional<Device> found;
  std::optional<Device> stranger;
  for (const IValue& value : arguments) {
    if (value.isDevice() && !found && value.toDevice().type() == kEmulated) found = with_index(value.toDevice());
  }
  for (const IValue& value : arguments) {
    map_tensors(value, [&](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      bool may_be_elsewhere = value.isOptionalTensorList() || (value.isTensor() && tensor.dim() == 0);
      if (!is_ours(tensor) && may_be_elsewhere) return tensor;
      if (found && *found != tensor.device()) stranger = tensor.device();
      if (!found || is_ours(tensor)) found = tensor.device();
      return tensor;
    });
  }
  auto device = found.value_or(Device(kEmulated, current_device));
  TORCH_CHECK(
      !stranger && device.type() == kEmulated, "Expected all tensors to be on the same device, but found at least two, ",
      device, " and ", stranger.value_or(device), " (", op.schema().name(), ")");
  return device;
}

at::Generator checked_generator(const IValue& value, Device device, const std::string& name) {
  auto generator = value.isNone() ? default_generator(device.index()) : value.toGenerator();
  TORCH_CHECK(
      generator.device() == device, "Expected a generator of ", device, " but found one of ", generator.device(), " (",
      name, ")");
  return Generator::of(generator).inner;
}

using Aliases = std::vector<std::pair<Tensor, Tensor>>;  // on the device, on the host

// Follows what a kernel did to its arguments: an `out` may have got another size, and memory of its own.
void follow(const Aliases& aliases) {
  for (auto& [ours, theirs] : aliases) {
    if (theirs.storage().data() != ours.storage().data()) {
      ours.storage().set_data_ptr_noswap(adopted(theirs, ours.device()));
      ours.storage().set_nbytes(theirs.storage().nbytes());
    }
    if (theirs.sizes() != ours.sizes() || theirs.strides() != ours.strides()) {
      auto* impl = ours.unsafeGetTensorImpl();
      impl->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
    }
  }
}

// Counts an operation: as a launch unless it makes a view, and as a wait if the host needs its values to go on.
void count_operation(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments) {
  static const std::set<std::string> asking{
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::_linalg_eigh"};
  const auto& results = schema.returns();
  bool is_view = !results.empty() && results[0].alias_info() && !results[0].alias_info()->isWrite();
  if (!is_view) count("launch " + schema.name());
  bool by_mask = false;  // an index by a mask has as many rows as the mask has ones
  for (const IValue& value : arguments) {
    if (!value.isOptionalTensorList()) continue;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      by_mask |= tensor && tensor->scalar_type() == at::kBool;
    }
  }
  if (by_mask || asking.count(schema.name())) count("wait " + schema.name());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  const auto device = device_of(op, c10::ArrayRef<IValue>(*stack).slice(begin));
  count_operation(schema, c10::ArrayRef<IValue>(*stack).slice(begin));

  Aliases aliases;
  auto down = [&](const Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    for (auto& [ours, theirs] : aliases) {
      if (ours.is_same(tensor)) return theirs;
    }
    aliases.emplace_back(tensor, on_host(tensor));
    return aliases.back().second;
  };
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < count; i++) {
    IValue& value = (*stack)[begin + i];
    if (takes_generator(schema.arguments()[i])) {
      value = checked_generator(value, device, schema.name());
      draws = false;
    } else if (value.isDevice()) {
      value = Device(c10::kCPU);
    } else {
      value = map_tensors(value, down);
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto lent = draws ? std::make_unique<Lent>(device) : nullptr;
    op.callBoxed(stack);
  }
  follow(aliases);

  std::unordered_map<void*, c10::Storage> made;  // several results may share memory
  auto up = [&](const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    check_dtype(tensor.scalar_type());
    for (auto& [ours, theirs] : aliases) {
      if (theirs.is_same(tensor)) return ours;
    }
    for (auto& [ours, theirs] : aliases) {
      bool is_view = tensor.storage().nbytes() && theirs.storage().data() == tensor.storage().data();
      if (is_view) return tensor_of(ours.storage(), kKeys, tensor);
    }
    void* key = tensor.storage().unsafeGetStorageImpl();
    if (!made.count(key)) made.emplace(key, adopted_storage(tensor, device));
    return tensor_of(made.at(key), kKeys, tensor);
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    (*stack)[i] = map_tensors((*stack)[i], up);
  }
}

// ---- Operations that cannot fall back: they make or view memory, or move it between devices ----

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_dtype(c10::dtype_or_default(dtype));
  c10::DeviceGuard guard(with_index(c10::device_or_default(device)));
  return at::detail::empty_generic(size, &device_allocator, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  check_dtype(c10::dtype_or_default(dtype));
  c10::DeviceGuard guard(with_index(c10::device_or_default(device)));
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t needed = self.element_size() * (self.storage_offset() + c10::multiply_integers(size));
  if (needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage_at(
    Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  int64_t length = storage.nbytes() / self.element_size();
  return set_storage_at(self, std::move(storage), 0, {length}, {1});
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  bool pinned_host = is_pinned((from.is_cpu() ? from : to).storage().data());
  if (from.is_cpu()) {
    count(non_blocking && pinned_host ? "upload pinned" : "upload pageable");
    if (!non_blocking) count("wait copy to the device");
  } else if (to.is_cpu()) {
    if (!non_blocking) count("wait copy to the host");
  } else {
    count("launch aten::copy_");
  }
  if (non_blocking && to.is_cpu() && defers_copies) {
    defer(to, on_host(from));
  } else {
    on_host(to).copy_(on_host(from));
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  count("wait item");
  return on_host(tensor).item();
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  for (const auto& tensor : {weight, bias.value_or(Tensor())}) {
    bool elsewhere = tensor.defined() && tensor.device() != input.device();
    TORCH_CHECK(!elsewhere, "Expected all tensors to be on ", input.device(), ", found weights on ", tensor.device());
  }
  count("launch aten::convolution");
  at::AutoDispatchBelowADInplaceOrView guard;
  auto host_bias = bias ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  auto result = at::convolution(
      on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups);
  return on_device(result, input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  count("launch aten::convolution_backward");
  at::AutoDispatchBelowADInplaceOrView guard;
  int64_t bias_size[] = {transposed ? weight.size(1) * groups : weight.size(0)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), c10::IntArrayRef(bias_size), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  auto device = input.device();
  return {on_device(of_input, device), on_device(of_weight, device), on_device(of_bias, device)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage_at);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  // One kernel on CUDA; a device without one takes several steps.
  for (auto* name : {"silu_backward", "_foreach_copy_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// ---- Autocast, with CUDA's lists ----

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the name that the macros use
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_OPT_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace

// ---- For Python ----

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("device_count", [] { return int(kDevices); });
  module.def("current_device", [] { return int(current_device); });
  module.def("set_device", [](int index) { set_device(DeviceIndex(index)); });
  module.def("default_generator", [](int index) { return default_generator(DeviceIndex(index)); });
  module.def("synchronize", &synchronize);
  module.def("refuse_float64", [](bool on) { refuses_float64 = on; });
  module.def("defer_copies", [](bool on) { defers_copies = on; });
  module.def("live_bytes", [](int index) { return live_bytes.at(index).load(); });
  module.def("peak_bytes", [](int index) { return peak_bytes.at(index).load(); });
  module.def("reset_peak", [](int index) { peak_bytes.at(index) = live_bytes.at(index).load(); });
  module.def("counts", [] {
    std::lock_guard<std::mutex> lock(counts_mutex);
    return counts;
  });
}
