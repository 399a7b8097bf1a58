# mypy: ignore-errors
import torch
from torch.utils.data import Dataset


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.size = size
        source = torch.Generator().manual_seed(11)
        self.data = [(torch.rand(20, generator=source), torch.rand(1, generator=source)) for _ in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]
