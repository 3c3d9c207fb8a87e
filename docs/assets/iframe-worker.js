/* Worker of a page that is opened as a file.

Browsers refuse to start a Worker from a file, and the search of mkdocs-material needs one. On such
a page this class takes its place and runs the script in a hidden frame. Pages from a web server
keep the Worker of the browser. The offline plugin of mkdocs-material would load such a class from
a network, unless mkdocs.yml lists a file with "iframe-worker" in its name. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      const inner = this.scope.document;
      // Firefox would replace an empty document that has not been written.
      inner.open();
      inner.write("<!doctype html><body>");
      inner.close();
      this.scope.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.createElement("script");
      script.src = new URL(address, document.baseURI);
      this.isLoaded = new Promise((resolve) => (script.onload = resolve));
      inner.body.append(script);
    }

    async postMessage(data) {
      await this.isLoaded;
      this.scope.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
