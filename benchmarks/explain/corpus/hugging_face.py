"""Programs of transformers, accelerate, peft and scikit-learn, with random weights of small sizes."""

import tempfile

import torch
from corpus import program
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def bert(**options):
    return BertModel(BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, **options
    )).eval()  # fmt: skip


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options
    )).eval()  # fmt: skip


@program("padding", library="transformers")
def bert_padded_to_the_longest_possible(fast):
    model = bert()
    ids, mask = torch.zeros(16, 384, dtype=torch.long), torch.zeros(16, 384, dtype=torch.long)
    ids[:, :64], mask[:, :64] = torch.randint(3, 500, (16, 64)), 1
    cut = 64 if fast else 384

    def work():
        with torch.inference_mode():
            for _ in range(4):
                model(input_ids=ids[:, :cut], attention_mask=mask[:, :cut])

    return work


@program("launch", "small batch", library="transformers")
def sentences_encoded_one_by_one(fast):
    model, ids = bert(), torch.randint(3, 500, (64, 12))

    def work():
        with torch.inference_mode():
            for rows in ids.split(64 if fast else 1):
                model(input_ids=rows).last_hidden_state.mean(1)

    return work


@program("launch", "small batch", library="transformers")
def answers_generated_one_by_one(fast):
    model, ids = llama(), torch.randint(3, 200, (8, 10))
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}

    def work():
        for rows in ids.split(8 if fast else 1):
            model.generate(rows, attention_mask=torch.ones_like(rows), **options)

    return work


@program("attention", library="transformers")
def eager_attention_of_long_texts(fast):
    model, ids = bert(attn_implementation="sdpa" if fast else "eager", max_position_embeddings=1024), None
    ids = torch.randint(3, 500, (2, 768))

    def work():
        with torch.inference_mode():
            for _ in range(4):
                model(input_ids=ids, attention_mask=torch.ones_like(ids))

    return work


class Texts(Dataset):
    def __init__(self, fast):
        self.fast = fast
        self.ready = [self._make(i) for i in range(48)] if fast else []

    def _make(self, i):
        ids = [(i * j) % 197 + 3 for j in range(24)]
        for k in range(30000):
            ids[k % 24] = (ids[k % 24] * 31 + k) % 197 + 3
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)}

    def __len__(self):
        return 48

    def __getitem__(self, i):
        return self.ready[i] if self.fast else self._make(i)


@program("loading", library="transformers Trainer", steady=True)
def trainer_with_a_slow_dataset(fast):
    model, data = llama(), Texts(fast)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=8, num_train_epochs=8, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1000,
    )  # fmt: skip
    return lambda: Trainer(model, arguments, train_dataset=data).train()


@program("tokenize", library="transformers")
def texts_tokenized_each_step(fast):
    from transformers import BertTokenizerLegacy as Slow  # type: ignore[attr-defined]

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(97 + i) * n for i in range(26) for n in (1, 2, 3))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.write("\n".join(words))
    tokenizer, model = Slow(file.name), bert()
    texts = [" ".join(words[5 + (i * j) % 78] for j in range(240)) for i in range(8)]
    options = {"return_tensors": "pt", "truncation": True, "max_length": 64}
    ready = tokenizer(texts, **options)

    def work():
        with torch.inference_mode():
            for _ in range(8):
                model(**(ready if fast else tokenizer(texts, **options)))

    return work


@program("python", library="scikit-learn")
def scaler_row_by_row(fast):
    x = torch.randn(300, 32).numpy()
    scaler, net = StandardScaler().fit(x), torch.nn.Linear(32, 4)

    def work():
        with torch.inference_mode():
            if fast:
                net(torch.from_numpy(scaler.transform(x)))
            else:
                for i in range(300):
                    net(torch.from_numpy(scaler.transform(x[i : i + 1])))

    return work


@program("adapters", "launch", library="peft")
def adapters_left_beside_the_weights(fast):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    model = model.merge_and_unload() if fast else model
    ids = torch.randint(3, 200, (1, 16))

    def work():
        with torch.inference_mode():
            for _ in range(30):
                model(input_ids=ids)

    return work


@program("sync", library="accelerate")
def accelerate_reads_each_loss(fast):
    from accelerate import Accelerator

    helper = Accelerator(cpu=True)
    net = torch.nn.Linear(16, 16)
    net, optimizer, loader = helper.prepare(
        net, torch.optim.SGD(net.parameters(), 1e-3), DataLoader(torch.randn(50, 256, 16).unbind(), batch_size=None)
    )

    def work():
        total = 0.0
        for x in loader:
            losses = net(x).square().mean(1)
            helper.backward(losses.mean())
            optimizer.step()
            optimizer.zero_grad()
            if fast:
                total += losses.detach().sum()
            else:
                total += sum(each.item() for each in helper.gather(losses))

    return work
