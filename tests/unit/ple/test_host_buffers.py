"""Buffers of the host whose memory is used again."""

import torch

from skyrl_qwen38.ple.host_buffers import HostBuffers

CPU = torch.device("cpu")


def test_memory_returns_when_the_last_view_is_gone():
    buffers = HostBuffers()
    first = buffers.empty(1 << 20, 4, dtype=torch.uint8, device=CPU)
    address, view = first.data_ptr(), first[5:]
    del first
    other = buffers.empty(1 << 20, 4, dtype=torch.uint8, device=CPU)
    assert other.data_ptr() != address, "a view still reads it"
    del view
    assert buffers.empty(1 << 19, 2, dtype=torch.float32, device=CPU).data_ptr() == address


def test_a_buffer_much_larger_than_what_is_asked_for_is_left_alone():
    buffers = HostBuffers()
    large = buffers.empty(64 << 20, dtype=torch.uint8, device=CPU)
    address = large.data_ptr()
    del large
    small = buffers.empty(2 << 20, dtype=torch.uint8, device=CPU)
    assert small.data_ptr() != address


def test_shapes_and_dtypes():
    buffers = HostBuffers()
    for shape in ((0, 8), (3, 5), (1 << 19, 3)):
        tensor = buffers.empty(*shape, dtype=torch.bfloat16, device=CPU)
        assert tensor.shape == shape
        assert tensor.dtype == torch.bfloat16
        tensor.fill_(1)
        assert tensor.is_contiguous()


def test_tensors_outlive_the_pool():
    buffers = HostBuffers()
    tensor = buffers.empty(1 << 20, 2, dtype=torch.uint8, device=CPU)
    del buffers
    assert tensor.fill_(3).sum() == 3 << 21
