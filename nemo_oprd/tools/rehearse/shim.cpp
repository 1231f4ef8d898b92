// What the CPU build of torch lacks so that fake tensors can be on the device "cuda".
//
// Autograd asks a device guard for streams and the current device, and the CUDA hooks whether there is a device. Both do
// nothing here: fake tensors have no memory, and no kernel is started.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct RehearsalHooks final : at::CUDAHooksInterface {
  explicit RehearsalHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
};

// preferred: torch's CUDA build, which is loaded later, has hooks of its own and leaves these
const at::RegistererCUDAHooksRegistry hooks(
    "CUDAHooks",
    c10::REGISTRY_PREFERRED,
    at::CUDAHooksRegistry(),
    at::RegistererCUDAHooksRegistry::DefaultCreator<RehearsalHooks>);

struct RehearsalGuard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device only() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, only()); }

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Device getDevice() const override { return only(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

RehearsalGuard guard;

}  // namespace

// Called after torch's libraries are loaded, because the guard that is registered last is the one that is asked.
extern "C" void register_rehearsal_guard() {
  const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
}
