"""Copies between host and device: on the CPU plain ones, on a GPU beside its kernels."""

import pytest
import torch

from pipetransformer.host_copies import Download, HostCopies, Upload, empty_for, to_device, trim_pinned

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=GPU)]
CPU = torch.device("cpu")
NUMBERS = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_gets_to_the_device_in_the_type_that_is_asked_for(device: torch.device) -> None:
    moved = to_device(NUMBERS, device, torch.float64)
    assert (moved.device, moved.dtype) == (device, torch.float64)
    assert torch.equal(moved.cpu(), NUMBERS.double())
    assert to_device(moved, device) is moved


@pytest.mark.parametrize("device", DEVICES)
def test_copies_to_the_host_are_contiguous_and_stay_when_the_original_changes(device: torch.device) -> None:
    tensor, copies = to_device(NUMBERS.clone(), device), HostCopies(device)
    copy = copies.copy(tensor.T)
    copies.wait()
    tensor.zero_()
    assert copy.is_contiguous()
    assert torch.equal(copy, NUMBERS.T)


def test_what_the_host_has_is_moved_nowhere() -> None:
    assert HostCopies(CPU).move(NUMBERS) is NUMBERS


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_uploaded_arrives_and_its_memory_can_be_written_again(device: torch.device) -> None:
    buffer = empty_for(device, 6, torch.float32)
    for factor in range(4):
        buffer.copy_(NUMBERS.flatten() * factor)
        upload = Upload(buffer, device)
        arrived = upload.take()
        upload.wait()
        with pytest.raises(AssertionError, match="has been taken"):  # it holds no memory of the device
            upload.take()
        assert arrived.device == device
        assert torch.equal(arrived.cpu(), NUMBERS.flatten() * factor)


@pytest.mark.parametrize("is_initialized", [True, False])
def test_free_pinned_memory_goes_back_where_there_is_a_gpu(
    is_initialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back = list[bool]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: given_back.append(True), raising=False)
    trim_pinned()
    assert given_back == [True] * is_initialized
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    trim_pinned()  # as on an earlier release


@pytest.mark.parametrize("device", DEVICES)
def test_a_download_has_the_numbers_of_its_moment(device: torch.device) -> None:
    download = Download(to_device(NUMBERS[1], device))
    assert download.values() == [3.0, 4.0, 5.0]


@GPU
def test_none_of_them_makes_the_host_wait() -> None:
    device = torch.device("cuda", 0)
    tensor = to_device(NUMBERS, device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        to_device(NUMBERS, device, torch.float64)
        HostCopies(device).copy(tensor)
        Upload(NUMBERS.pin_memory(), device).take()
        assert Download(tensor[0]).values() == [0.0, 1.0, 2.0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
