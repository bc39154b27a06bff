// Run the functions of the page (the argument) on a document of few elements; print what they say of each report (stdin).
import fs from "fs";

class Element {
  constructor() { Object.assign(this, { children: [], dataset: {}, style: {}, textContent: "", className: "" }); }
  append(...more) { for (const e of more) { e.parent = this; this.children.push(e); } }
  remove() { this.parent.children = this.parent.children.filter(e => e !== this); }
  setAttribute() {}
  replaceChildren(...more) { this.children = []; this.append(...more); }
  addEventListener() {}
  get firstChild() { return this.children[0]; }
  get lastChild() { return this.children.at(-1); }
}

const elements = {};
const document = {
  getElementById: id => elements[id] ??= new Element(), createElement: () => new Element(),
  documentElement: new Element(), body: new Element(), hidden: false,
};
const script = fs.readFileSync(process.argv[2], "utf8").match(/<script>([\s\S]*)<\/script>/)[1].replace(/refresh\(\);\s*$/, "");
const page = new Function("document", "sessionStorage", "fetch", "setTimeout", "addEventListener",
  `${script}; return { head, requests, figures, refresh };`)(
  document, { getItem: () => "wrong" }, async () => ({ ok: false, status: 401 }), () => {}, () => {});
const said = [];
for (const report of JSON.parse(fs.readFileSync(0, "utf8"))) {
  page.head(report);
  page.requests(report);
  if (report.dispatch) page.figures(report);  // of complete reports only
  said.push({
    headline: elements.headline.textContent, none: elements.none.textContent,
    figures: Object.fromEntries((elements.figures?.children ?? []).map(box => box.children.map(e => e.textContent))),
    rows: elements.requests.children.map(item => item.firstChild.children.map(e => e.textContent)),
  });
}
await page.refresh();
console.log(JSON.stringify([...said, elements.state.textContent]));
